// Calls that fail, for every library that is emulated.
//
// EMULATED_FAILS says which: `cuLaunchKernel:12:719` lets the twelfth call of that function answer status 719; `12+` that one and
// all behind it; `12:719:late` lets it succeed, and what it began fail when the GPU comes to it; `12:hang` lets the GPU never come
// past it; `@1` at the end means rank 1 alone. Several are parted by commas. Each that comes is a line of the file EMULATED_FAILED.
// EMULATED_CALLS is a file in which every process leaves, at its end, how often each function was called: its rank, name, number.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace failing {

struct Failure {
    std::string call;
    uint64_t at;
    bool and_later;
    int status;
    bool late, hangs;
};

// What a call is to answer; 0: what it does else.
struct Answer {
    int status = 0;
    bool late = false, hangs = false;
};

inline const char* rank() {
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    return rank ? rank : "0";
}

inline std::vector<Failure> told() {
    std::vector<Failure> all;
    const char* text = std::getenv("EMULATED_FAILS");
    std::string rest = text ? text : "";
    while (!rest.empty()) {
        size_t comma = rest.find(',');
        std::string one = rest.substr(0, comma);
        rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
        size_t only = one.find('@');
        if (only != std::string::npos && one.substr(only + 1) != rank()) continue;
        one = one.substr(0, only);
        size_t first = one.find(':'), second = one.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            std::fprintf(stderr, "EMULATED_FAILS: %s is no call:number:status\n", one.c_str());
            std::exit(3);
        }
        std::string number = one.substr(first + 1, second - first - 1), what = one.substr(second + 1);
        all.push_back({one.substr(0, first), std::strtoull(number.c_str(), nullptr, 10), number.back() == '+',
                       std::atoi(what.c_str()), what.find(":late") != std::string::npos, what == "hang"});
    }
    return all;
}

inline void append(const char* variable, const std::string& line) {
    const char* path = std::getenv(variable);
    std::FILE* file = path ? std::fopen(path, "a") : nullptr;
    if (!file) return;
    std::fwrite(line.data(), 1, line.size(), file);
    std::fclose(file);
}

// Calls by name. Left in the file when the process ends.
struct Calls {
    std::mutex one;
    std::map<std::string, uint64_t> counts;
    std::vector<Failure> failures = told();

    ~Calls() {
        std::string lines;
        for (const auto& [name, count] : counts) lines += std::string(rank()) + " " + name + " " + std::to_string(count) + "\n";
        append("EMULATED_CALLS", lines);
    }

    uint64_t count(const char* call) {
        std::lock_guard<std::mutex> lock(one);
        return counts[call];
    }

    Answer next(const char* call) {
        std::lock_guard<std::mutex> lock(one);
        uint64_t number = ++counts[call];
        for (const Failure& failure : failures) {
            if (failure.call != call || (failure.and_later ? number < failure.at : number != failure.at)) continue;
            append("EMULATED_FAILED", std::string(rank()) + " " + call + " " + std::to_string(number) + "\n");
            return {failure.status, failure.late, failure.hangs};
        }
        return {};
    }
};

inline Calls& calls() {
    static Calls calls;
    return calls;
}

inline Answer next(const char* call) { return calls().next(call); }

}  // namespace failing
