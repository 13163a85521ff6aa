// What of the emulated driver's kernels and waits goes wrong, where a test wants it so.
//
// EMULATED_SPOILS="adamw_step:5:0": the fifth run of that kernel leaves NaN in the first 4 bytes of what its argument 0 points to;
// with "5+" also each later one, with "@1" at the end those of rank 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include "failing.h"

namespace {

// Whether a run of a kernel is to leave NaN behind its argument `argument`, as EMULATED_SPOILS says.
bool spoils(const std::string& kernel, int* argument) {
    static const char* told = std::getenv("EMULATED_SPOILS");
    if (!told) return false;
    static char name[64], plus[2];
    static int number = 0, at = 0, only = -1;
    static int words = std::sscanf(told, "%63[^:]:%d%1[+]", name, &number, plus);
    static const char* rest = std::strchr(told, ':') ? std::strchr(std::strchr(told, ':') + 1, ':') : nullptr;
    static int more = rest ? std::sscanf(rest, ":%d@%d", &at, &only) : 0;
    if (words < 2 || more < 1 || kernel != name || (only >= 0 && only != std::atoi(failing::rank()))) return false;
    static int runs = 0;
    *argument = at;
    runs++;
    bool now = words == 3 ? runs >= number : runs == number;
    if (now) failing::append("EMULATED_FAILED", std::string(failing::rank()) + " " + kernel + "\n");
    return now;
}

// Whether a wait of the first stream, or of one beside it, is left out, as EMULATED_FORGETS says.
bool is_forgotten(bool is_first) {
    static const char* told = std::getenv("EMULATED_FORGETS");
    return told && !std::strcmp(told, is_first ? "1" : "2");
}

}  // namespace
