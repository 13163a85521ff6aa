// What of the emulated driver's copies, waits and kernels goes wrong, where a test wants it so.
//
// EMULATED_MOVES="bit 130000 140000": what becomes of copies of so many bytes beside the first stream, by which state and weights
// leave for the host and come back. To the GPU "lost" brings all but the last 512 bytes, "halves" each half in the other's place,
// "bit" another bit in the middle, "stale" what the same place of the host held at the copy before; "kept" brings to a place of
// the host nothing from the second time on. EMULATED_SPOILS="adamw_step:5:0": the fifth run of that kernel leaves NaN in the first
// 4 bytes of what its argument 0 points to; with "5+" also each later one, with "@1" at the end those of rank 1.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>
#include "failing.h"
#include "streams.h"

namespace {

// The words of a switch: a name, and numbers from and to.
struct Switch {
    char name[16] = "";
    unsigned long long from = 0, to = UINT64_MAX;

    explicit Switch(const char* variable) {
        const char* told = std::getenv(variable);
        if (told) std::sscanf(told, "%15s %llu %llu", name, &from, &to);
    }

    bool is(const char* what, uint64_t number) const { return !std::strcmp(name, what) && from <= number && number <= to; }
};

// A copy between host and GPU that goes wrong as EMULATED_MOVES says: what it does instead, or nothing.
Work moved(uint64_t to, uint64_t from, size_t bytes, bool is_up) {
    static const Switch told("EMULATED_MOVES");
    auto* into = reinterpret_cast<uint8_t*>(to);
    auto* of = reinterpret_cast<const uint8_t*>(from);
    if (!is_up) {
        static std::map<uint64_t, int> brought;
        if (told.is("kept", bytes) && brought[to]++) return [] {};
        return nullptr;
    }
    size_t half = bytes / 2;
    if (told.is("lost", bytes)) return [=] { std::memcpy(into, of, bytes - 512); };
    if (told.is("halves", bytes)) return [=] {
        std::memcpy(into, of + half, bytes - half);
        std::memcpy(into + bytes - half, of, half);
    };
    if (told.is("bit", bytes)) return [=] {
        std::memcpy(into, of, bytes);
        into[half] ^= 1;
    };
    static std::map<std::pair<uint64_t, size_t>, std::vector<uint8_t>> before;
    if (told.is("stale", bytes)) return [=] {
        std::vector<uint8_t> now(of, of + bytes);
        auto old = before.find({from, bytes});
        std::memcpy(into, old == before.end() ? of : old->second.data(), bytes);
        before[{from, bytes}] = std::move(now);
    };
    return nullptr;
}

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
    static const Switch told("EMULATED_FORGETS");
    static uint64_t waits[2];
    return told.is(is_first ? "1" : "2", ++waits[is_first]);
}

}  // namespace
