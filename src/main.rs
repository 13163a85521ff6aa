fn main() {
    // These calls come first, while this is the only thread.
    rlhf_hpc::sys::signals::install();
    rlhf_hpc::sys::environment::hide();
    rlhf_hpc::sys::environment::keep_off_network();
    rlhf_hpc::sys::environment::limit_nccl();
    rlhf_hpc::comm::abort::install_errors();
    std::process::exit(rlhf_hpc::cli::main(std::env::args_os().skip(1).collect()));
}
