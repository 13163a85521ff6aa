fn main() {
    rlhf_hpc::comm::abort::install_errors();
    let arguments = std::env::args().skip(1).collect();
    std::process::exit(rlhf_hpc::cli::main(arguments));
}
