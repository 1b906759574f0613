// Throws and catches through frames with destructors in an endless loop.
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

static volatile long sink;

struct Guard {
	std::vector<std::string> names;
	explicit Guard(int n) : names(n % 7 + 1, std::string(n % 40 + 1, 'x')) {}
	~Guard() { sink += names.size(); }
};

__attribute__((noinline)) static int descend(int n, int depth)
{
	Guard guard(depth);
	if (depth == 0) {
		if (n % 3 == 0)
			throw std::runtime_error("three " + std::to_string(n));
		return n;
	}
	return descend(n, depth - 1) + guard.names.size();
}

int main()
{
	std::map<std::string, int> seen;
	for (int n = 0;; n++) {
		try {
			sink += descend(n, n % 25);
		} catch (const std::exception &e) {
			seen[e.what()]++;
		}
		if (seen.size() > 1000)
			seen.clear();
	}
}
