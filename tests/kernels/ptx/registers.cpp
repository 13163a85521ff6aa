// Places of registers. A text has thousands of them, each written once; those that do not live at one time share a place, so
// that a warp's file stays in the cache.
#include "machine.h"

namespace ptx {

namespace {

struct Part {
    u32 begin, end;
    std::vector<u32> next;
    std::vector<u64> read_first, written, in, out;
};

bool has(const std::vector<u64>& set, u32 i) { return set[i / 64] >> i % 64 & 1; }
void put(std::vector<u64>& set, u32 i) { set[i / 64] |= 1ull << i % 64; }

template <class F> void each_operand(const Instruction& i, F f) {
    for (int k = 0; k < i.operands; k++) {
        if (i.at[k] >= 0) f((u32)i.at[k], k < i.results);
    }
    if (i.guard != NONE) f((u32)i.guard, false);
}

// Runs of instructions that no branch enters or leaves, and where each goes on.
std::vector<Part> parts_of(const std::vector<Instruction>& code, size_t words) {
    std::vector<bool> begins(code.size() + 1);
    begins[0] = true;
    for (size_t i = 0; i < code.size(); i++) {
        if (code[i].kind != Kind::Branch && code[i].kind != Kind::Exit) continue;
        begins[i + 1] = true;
        if (code[i].kind == Kind::Branch) begins[code[i].target] = true;
    }
    std::vector<Part> parts;
    std::vector<u32> part_at(code.size() + 1);
    for (u32 i = 0; i < code.size(); i++) {
        if (begins[i]) parts.push_back({i, i, {}, {}, {}, {}, {}});
        part_at[i] = (u32)parts.size() - 1;
        parts.back().end = i + 1;
    }
    for (Part& p : parts) {
        const Instruction& last = code[p.end - 1];
        bool always = last.guard == NONE;
        if (last.kind == Kind::Branch) p.next.push_back(part_at[last.target]);
        bool leaves = (last.kind == Kind::Branch || last.kind == Kind::Exit) && always;
        if (!leaves && p.end < code.size()) p.next.push_back(part_at[p.end]);
        for (auto* set : {&p.read_first, &p.written, &p.in, &p.out}) set->assign(words, 0);
    }
    return parts;
}

}  // namespace

void place_registers(Kernel& kernel, const std::vector<u32>& bytes) {
    std::vector<Instruction>& code = kernel.code;
    size_t words = (bytes.size() + 63) / 64;
    std::vector<Part> parts = parts_of(code, words);
    for (Part& p : parts) {
        for (u32 i = p.begin; i < p.end; i++) {
            each_operand(code[i], [&](u32 r, bool is_result) {
                if (!is_result && !has(p.written, r)) put(p.read_first, r);
            });
            // Under a guard a lane may keep what it had.
            each_operand(code[i], [&](u32 r, bool is_result) {
                if (is_result && code[i].guard == NONE) put(p.written, r);
                else if (is_result && !has(p.written, r)) put(p.read_first, r);
            });
        }
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t k = parts.size(); k-- > 0;) {
            Part& p = parts[k];
            for (size_t w = 0; w < words; w++) {
                u64 out = 0;
                for (u32 n : p.next) out |= parts[n].in[w];
                u64 in = p.read_first[w] | (out & ~p.written[w]);
                changed |= in != p.in[w];
                p.out[w] = out, p.in[w] = in;
            }
        }
    }
    // From where to where each register lives, in the order of the text.
    constexpr u32 NEVER = ~0u;
    std::vector<u32> first(bytes.size(), NEVER), last(bytes.size(), 0);
    auto lives = [&](u32 r, u32 at) { first[r] = at < first[r] ? at : first[r], last[r] = at > last[r] ? at : last[r]; };
    for (Part& p : parts) {
        for (u32 i = p.begin; i < p.end; i++) each_operand(code[i], [&](u32 r, bool) { lives(r, i); });
        for (u32 r = 0; r < bytes.size(); r++) {
            if (has(p.in, r)) lives(r, p.begin);
            if (has(p.out, r)) lives(r, p.end - 1);
        }
    }
    std::vector<std::vector<u32>> begins(code.size()), ends(code.size());
    for (u32 r = 0; r < bytes.size(); r++) {
        if (first[r] != NEVER) begins[first[r]].push_back(r), ends[last[r]].push_back(r);
    }
    std::map<u32, std::vector<i32>> free;
    std::vector<i32> place(bytes.size(), NONE);
    u32 top = 0;
    for (u32 i = 0; i < code.size(); i++) {
        for (u32 r : begins[i]) {
            // Predicates are a bit for each lane.
            u32 size = bytes[r] <= 2 ? 64 : bytes[r] * LANES;
            std::vector<i32>& kept = free[size];
            if (kept.empty()) place[r] = (i32)top, top += size;
            else place[r] = kept.back(), kept.pop_back();
        }
        for (u32 r : ends[i]) free[bytes[r] <= 2 ? 64 : bytes[r] * LANES].push_back(place[r]);
    }
    for (Instruction& i : code) {
        for (int k = 0; k < i.operands; k++) {
            if (i.at[k] >= 0) i.at[k] = place[(u32)i.at[k]];
        }
        if (i.guard != NONE) i.guard = place[(u32)i.guard];
        if (i.members >= 0) i.members = place[(u32)i.members];
    }
    kernel.file_bytes = (top + 63) / 64 * 64 + 64;
}

}  // namespace ptx
