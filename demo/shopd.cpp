// shopd: a small shop service with two memory problems, for fragprof to find.
//
//   A leak:          VisitorLog::remember keeps a record of each new visitor, and none is ever removed.
//   Fragmentation:   Catalog::load builds a price list of many small entries; Catalog::keep_bestsellers then drops all but every 16th.
//                    The survivors are on every page of the list, so the memory of the dropped ones cannot be returned to the system.
//
// Everything else behaves: request buffers and sessions are freed. The process's RSS climbs and stays up; a leak checker finds only the
// first problem.
//
// Usage: shopd [seconds], 20 by default; SIGINT and SIGTERM end it earlier.

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

using Clock = std::chrono::steady_clock;

namespace shop {

volatile std::sig_atomic_t stopped = 0;

void on_signal(int) { stopped = 1; }

constexpr int kRequestsPerTick = 20;                        // 2,000 requests per second
constexpr auto kTick = std::chrono::milliseconds(10);
constexpr auto kCatalogPeriod = std::chrono::seconds(3);
constexpr std::size_t kProducts = 100000;
constexpr std::size_t kBestsellerEvery = 16;                // 16 entries of 256 bytes share a page
constexpr std::size_t kSessionsMax = 500;

/// The data of one product: 240 bytes, a chunk of 256.
struct Product {
    unsigned id;
    unsigned cents;
    char name[232];
};

/// The price list.
class Catalog {
  public:
    /// Reads a new list, as from the warehouse.
    void load(unsigned edition) {
        for (std::size_t i = 0; i < kProducts; i++) {
            auto product = std::make_unique<Product>();
            product->id = static_cast<unsigned>(i);
            product->cents = edition * 100 + static_cast<unsigned>(i % 997);
            std::snprintf(product->name, sizeof product->name, "product %zu of edition %u", i, edition);
            fresh_.push_back(std::move(product));
        }
    }

    /// Keeps the bestsellers and drops the rest: the fragmentation. Most of the memory is free now, but hardly any page is.
    void keep_bestsellers() {
        bestsellers_.clear();
        for (std::size_t i = 0; i < fresh_.size(); i++) {
            if (i % kBestsellerEvery == 0) {
                bestsellers_.push_back(std::move(fresh_[i]));
            }
        }
        fresh_.clear();
        fresh_.shrink_to_fit();
    }

    std::size_t size() const { return bestsellers_.size(); }

  private:
    std::vector<std::unique_ptr<Product>> fresh_;
    std::vector<std::unique_ptr<Product>> bestsellers_;
};

/// All visitors so far. Meant to be emptied by a job that was never written.
class VisitorLog {
  public:
    /// Keeps a record of a visitor: the leak.
    void remember(unsigned visitor) {
        char *record = static_cast<char *>(std::malloc(kRecordBytes));
        if (record != nullptr) {
            std::snprintf(record, kRecordBytes, "visitor %u", visitor);
            records_.push_back(record);
        }
    }

    std::size_t bytes() const { return records_.size() * kRecordBytes; }

  private:
    static constexpr std::size_t kRecordBytes = 1000;
    std::deque<char *> records_;
};

/// Sessions of logged-in users: bounded, the oldest is removed first. No problem here.
class Sessions {
  public:
    void open(unsigned user) {
        sessions_.push_back("session of user " + std::to_string(user) + std::string(300, '.'));
        if (sessions_.size() > kSessionsMax) {
            sessions_.pop_front();
        }
    }

    std::size_t size() const { return sessions_.size(); }

  private:
    std::deque<std::string> sessions_;
};

class Shop {
  public:
    void serve(unsigned request) {
        // A buffer for the request and one for the response, freed when it is sent.
        std::vector<char> in(512 + request % 1024);
        std::string answer(2000 + request % 3000, ' ');
        std::memcpy(&answer[0], in.data(), in.size());
        if (request % 4 == 0) {
            visitors_.remember(request);
        }
        if (request % 10 == 0) {
            sessions_.open(request);
        }
    }

    void refresh_catalog() {
        catalog_.load(++edition_);
        catalog_.keep_bestsellers();
    }

    void status(unsigned requests) const {
        std::printf("shopd: %u requests, %zu sessions, %zu bestsellers, %zu KiB of visitor records\n", requests, sessions_.size(),
                    catalog_.size(), visitors_.bytes() / 1024);
        std::fflush(stdout);
    }

  private:
    Catalog catalog_;
    VisitorLog visitors_;
    Sessions sessions_;
    unsigned edition_ = 0;
};

} // namespace shop

int main(int argc, char **argv) {
    const int seconds = argc > 1 ? std::atoi(argv[1]) : 20;
    std::signal(SIGINT, shop::on_signal);
    std::signal(SIGTERM, shop::on_signal);

    std::printf("shopd: pid %d, serving for %d s\n", static_cast<int>(getpid()), seconds);
    std::fflush(stdout);

    shop::Shop the_shop;
    unsigned requests = 0;
    const auto end = Clock::now() + std::chrono::seconds(seconds);
    auto next_catalog = Clock::now() + shop::kCatalogPeriod;
    while (shop::stopped == 0 && Clock::now() < end) {
        for (int i = 0; i < shop::kRequestsPerTick; i++) {
            the_shop.serve(requests++);
        }
        if (Clock::now() >= next_catalog) {
            the_shop.refresh_catalog();
            the_shop.status(requests);
            next_catalog += shop::kCatalogPeriod;
        }
        std::this_thread::sleep_for(shop::kTick);
    }
    std::printf("shopd: done after %u requests\n", requests);
    return 0;
}
