//! The `fragprof` command.

fn main() -> std::process::ExitCode {
    fragprof::cli::main()
}
