// Failing calls, for every emulated library.
//
// EMULATED_FAILS selects them: `cuLaunchKernel:12:719` lets the twelfth call of that function return status 719; `12+`
// that call and all later ones; `12:719:late` lets it succeed, and the work that it started fail when the GPU reaches
// it; `1:hang` lets a collective not return for a minute; `@1` at the end means rank 1 alone. Each failure is a line of the file
// EMULATED_FAILED. EMULATED_SPOILS does the same for kernels: `adamw_step:5:0` lets the fifth run of that kernel leave
// zeros in the first KiB of its argument 0. EMULATED_CALLS is a file in which every process writes, at its end, the
// number of calls of each function and of runs of each kernel: its rank, name, number.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace failing {

struct Failure {
    std::string call;
    uint64_t at = 0;
    bool and_later = false;
    int status = 0;
    bool late = false, hangs = false;
};

// The requested result of a call, or else its ordinary result.
struct Answer {
    bool comes = false;
    int status = 0;
    bool late = false, hangs = false;
};

inline const char* rank() {
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    return rank ? rank : "0";
}

// Empty if no call fails on this rank.
inline Failure told(const char* variable) {
    const char* text = std::getenv(variable);
    std::string all = text ? text : "";
    size_t only = all.find('@'), first = all.find(':'), second = all.find(':', first + 1);
    if (all.empty() || (only != std::string::npos && all.substr(only + 1) != rank())) return {};
    if (first == std::string::npos || second == std::string::npos) {
        std::fprintf(stderr, "%s: %s is no call:number:status\n", variable, text);
        std::exit(3);
    }
    std::string number = all.substr(first + 1, second - first - 1), what = all.substr(second + 1, only - second - 1);
    return {all.substr(0, first), std::strtoull(number.c_str(), nullptr, 10), number.back() == '+', std::atoi(what.c_str()),
            what.find(":late") != std::string::npos, what == "hang"};
}

inline void append(const char* variable, const std::string& line) {
    const char* path = std::getenv(variable);
    std::FILE* file = path ? std::fopen(path, "a") : nullptr;
    if (!file) return;
    std::fwrite(line.data(), 1, line.size(), file);
    std::fclose(file);
}

struct Calls {
    std::mutex one;
    std::map<std::string, uint64_t> counts;
    const Failure failure;

    explicit Calls(const char* variable) : failure(told(variable)) {}

    uint64_t count(const char* call) {
        std::lock_guard<std::mutex> lock(one);
        return counts[call];
    }

    Answer next(const char* call) {
        std::lock_guard<std::mutex> lock(one);
        uint64_t number = ++counts[call];
        if (failure.call != call || (failure.and_later ? number < failure.at : number != failure.at)) return {};
        append("EMULATED_FAILED", std::string(rank()) + " " + call + " " + std::to_string(number) + "\n");
        return {true, failure.status, failure.late, failure.hangs};
    }
};

// Counts of calls by function and of runs by kernel. Written to the file when the process ends.
struct CallsOfFunctions : Calls {
    CallsOfFunctions() : Calls("EMULATED_FAILS") {}

    ~CallsOfFunctions() {
        std::string lines;
        for (const auto& [name, count] : counts) lines += std::string(rank()) + " " + name + " " + std::to_string(count) + "\n";
        append("EMULATED_CALLS", lines);
    }
};

inline Calls& calls() {
    static CallsOfFunctions calls;
    return calls;
}

inline Answer next(const char* call) { return calls().next(call); }

}  // namespace failing
