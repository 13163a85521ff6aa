fn main() {
    rlhf_hpc::sys::environment::prepare_libraries();
    let arguments = std::env::args().skip(1).collect();
    std::process::exit(rlhf_hpc::cli::main(arguments));
}
