// A machine that executes PTX, for tests: what nvcc makes of the kernels runs on the CPU, as the PTX ISA document says
// (release 8.7; sections are named where they are followed). Written from the document, beside the emulation and not from it.
//
// A kernel is decoded once: its virtual registers get places in a file of 32-lane vectors, its branches get targets. A warp
// executes an instruction for all its lanes at once; lanes that part are run lowest address first and meet again where they
// come to the same instruction. Instructions that need others (.sync) wait for them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ptx {

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef long long i64;

constexpr int LANES = 32, THREADS_MAX = 1024, WARPS_MAX = THREADS_MAX / LANES;
constexpr u32 ALL = ~0u;
// No register, no predicate, no line.
constexpr i32 NONE = INT32_MIN;

struct Warp;
struct Instruction;
// Executes an instruction for `lanes`.
using Run = void (*)(Warp&, const Instruction&, u32 lanes);

// How the loop over instructions treats one: as any other, or by itself. `Together` waits for the lanes it names.
enum class Kind : u8 { Plain, Branch, Exit, Together, BlockBarrier, Poll };

// What instructions are counted as.
enum class Class : u8 { Mma, Matrices, Copy, Shared, Global, F32, F64, Integer, Conversion, Move, Lanes, Control };
constexpr int CLASSES = 12;

enum class Space : u8 { Generic, Global, Shared, Local, Param };

constexpr int OPERANDS_MAX = 14;

struct Instruction {
    Run run = nullptr;
    // Places of registers in the file, results first; below 0: ~place among the constants.
    i32 at[OPERANDS_MAX];
    // What an address adds, or a number that is part of the instruction.
    i64 number = 0;
    u32 target = 0;
    i32 guard = NONE, members = NONE;
    bool guard_is_not = false;
    Kind kind = Kind::Plain;
    Class is = Class::Integer;
    u8 results = 0, operands = 0;
    // Of loads and stores: values, their bytes in memory, whether they carry a sign, and the bytes of an address.
    Space space = Space::Generic;
    u8 values = 1, bytes = 0, register_bytes = 0, address_bytes = 0;
    bool is_signed = false;
    // Bytes of what is loaded that the program looks at.
    u32 used_bytes = ALL;
    // Lines of the PTX and of the source.
    u32 line = 0, source_line = 0, source_file = 0;
};

struct Parameter {
    u32 kind, bytes;
};

struct SharedVariable {
    std::string name;
    u32 start, bytes;
};

// A kernel as its text has it, and as it is executed when it has been decoded.
struct Kernel {
    std::string name, unit;
    std::vector<Parameter> parameters;
    std::vector<u32> parameter_offsets;
    u32 parameter_bytes = 0;
    // Where its body begins and ends in the text of its unit.
    size_t begin = 0, end = 0;
    u32 first_line = 0;
    bool is_decoded = false;
    std::vector<Instruction> code;
    std::vector<u8> constants;
    // Bytes of a warp's registers.
    u32 file_bytes = 0;
    std::vector<SharedVariable> variables;
    u32 shared_bytes = 0, local_bytes = 0;
    // Whether it has instructions by which blocks wait for each other.
    bool waits_for_blocks = false;
};

struct Unit {
    std::string name;
    const char* text = nullptr;
    std::map<u32, std::string> files;
    // Of the whole module.
    std::map<std::string, u32> shared, dynamic;
};

// What a text or a kernel has that this machine does not know, or what a kernel did wrong.
struct Fault {
    std::string what;
    int lane = -1;
};

[[noreturn]] void fault(int lane, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Finds the kernels of a unit.
void parse(Unit& unit, std::map<std::string, Kernel>& kernels);
// Makes `kernel` ready to be executed.
void decode(const Unit& unit, Kernel& kernel);
// Gives registers their places. `kinds` are the bytes of each register; operands name registers until then.
void place_registers(Kernel& kernel, const std::vector<u32>& bytes);

// What an instruction is, by its full name: how it runs, and its operands: `r` 32 bits, `l` 64, `h` 16, `p` a predicate; those
// before `=` are results.
struct Meaning {
    Run run;
    const char* operands;
    Class is;
    Kind kind = Kind::Plain;
};
const std::map<std::string, Meaning>& meanings();
using Meanings = std::map<std::string, Meaning>;
void add_integers(Meanings& to);
void add_comparisons(Meanings& to);
void add_floats(Meanings& to);
void add_conversions(Meanings& to);
void add_lanes(Meanings& to);

void load(Warp& w, const Instruction& i, u32 lanes);
void store(Warp& w, const Instruction& i, u32 lanes);
void load_parameter(Warp& w, const Instruction& i, u32 lanes);
void load_matrices(Warp& w, const Instruction& i, u32 lanes);
void load_matrices_transposed(Warp& w, const Instruction& i, u32 lanes);
void copy_async(Warp& w, const Instruction& i, u32 lanes);
void copy_commit(Warp& w, const Instruction& i, u32 lanes);
void copy_wait(Warp& w, const Instruction& i, u32 lanes);
Run atomic(const std::string& operation, const std::string& type, Space space);

}  // namespace ptx
