#!/usr/bin/env bash
# The compiler that run.sh calls: counts of blocks and compared values in the program, for libFuzzer.
case " $* " in
*" --crate-name rlhf_hpc "* | *" --crate-name libjpeg_turbo_rs "* | *" --crate-name foreign "*)
  exec "$@" -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table \
    -C llvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing
  ;;
*) exec "$@" ;;
esac
