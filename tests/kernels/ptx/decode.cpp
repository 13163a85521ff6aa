// A kernel's text into what is executed.
#include "text.h"

#include <cstring>
#include <set>

namespace ptx {

namespace {

// What an operand may be, by a letter of `Meaning::operands`.
u32 bytes_of_letter(char letter) { return letter == 'l' ? 8 : letter == 'r' ? 4 : letter == 'h' ? 2 : 1; }

struct Register {
    u32 number, bytes;
};

// An address: a register or a fixed one, and what is added.
struct Address {
    bool has_register = false;
    Register base{};
    i64 offset = 0;
};

class Decoder {
public:
    Decoder(const Unit& unit, Kernel& kernel) : unit(unit), kernel(kernel) {}
    void run();

private:
    const Unit& unit;
    Kernel& kernel;
    std::map<std::string, Register> registers;
    std::vector<u32> register_bytes;
    std::map<std::string, u32> labels, symbols;
    std::map<std::pair<u64, u32>, i32> constants;
    std::vector<std::pair<u32, std::string>> jumps;
    u32 line = 0, source_line = 0, source_file = 0, used_bytes = ALL;

    void directive(const std::string& text);
    void location(const std::string& text);
    void declare_registers(const std::string& text);
    void declare_local(const std::string& text);
    void place_shared(std::map<std::string, u32> sizes, const std::map<std::string, u32>& dynamic);
    void instruction(std::string text);
    void branch(Instruction& i, const std::string& target);
    void plain(Instruction& i, const std::string& name, const std::vector<std::string>& operands);
    void narrow(std::string& name, u32 bytes);
    void moved(Instruction& i, std::string name, std::vector<std::string> operands);
    void accessed(Instruction& i, const std::vector<std::string>& name, std::vector<std::string> operands);
    void copied(Instruction& i, const std::vector<std::string>& operands);
    void exchanged(Instruction& i, const std::vector<std::string>& name, const std::vector<std::string>& operands);
    Address address(const std::string& text);
    void set_address(Instruction& i, const std::string& text);
    i32 operand(const std::string& text, u32 bytes);
    i32 constant(u64 bits, u32 bytes);
    const Register& find(const std::string& name);
    void add(Instruction& i, const std::string& text, u32 bytes) { i.at[i.operands++] = operand(text, bytes); }
    void mean(Instruction& i, const Meaning& meaning) {
        i.run = meaning.run, i.is = meaning.is, i.kind = meaning.kind;
    }
};

const Register& Decoder::find(const std::string& name) {
    auto found = registers.find(name);
    if (found == registers.end()) fault(-1, "line %u: what is %s?", line, name.c_str());
    return found->second;
}

i32 Decoder::constant(u64 bits, u32 bytes) {
    auto [place, is_new] = constants.insert({{bits, bytes}, 0});
    if (is_new) {
        size_t start = kernel.constants.size();
        kernel.constants.resize(start + (bytes == 1 ? 64 : bytes * LANES));
        u32 lanes = bits ? ALL : 0;
        if (bytes == 1) std::memcpy(&kernel.constants[start], &lanes, 4);
        else for (int l = 0; l < LANES; l++) std::memcpy(&kernel.constants[start + bytes * (size_t)l], &bits, bytes);
        place->second = ~(i32)start;
    }
    return place->second;
}

// A register, a number, or the address of a variable.
i32 Decoder::operand(const std::string& text, u32 bytes) {
    if (text.empty()) fault(-1, "line %u: an operand is missing", line);
    if (text[0] == '%') {
        const Register& r = find(text);
        if (r.bytes != bytes) fault(-1, "line %u: %s has %u bytes, %u are needed", line, text.c_str(), r.bytes, bytes);
        return (i32)r.number;
    }
    u64 bits;
    if (text[0] == '0' && (text[1] == 'f' || text[1] == 'F' || text[1] == 'd' || text[1] == 'D')) {
        bits = std::stoull(text.substr(2), nullptr, 16);
    } else if (text[0] == '-' || (text[0] >= '0' && text[0] <= '9')) {
        bits = text[0] == '-' ? (u64)std::stoll(text, nullptr, 0) : std::stoull(text, nullptr, 0);
    } else {
        auto symbol = symbols.find(text);
        if (symbol == symbols.end()) fault(-1, "line %u: what is %s?", line, text.c_str());
        bits = symbol->second;
    }
    return constant(bytes == 8 ? bits : bytes == 1 ? bits != 0 : bits & ((1ull << 8 * bytes) - 1), bytes);
}

Address Decoder::address(const std::string& text) {
    if (text.size() < 2 || text[0] != '[' || text.back() != ']') fault(-1, "line %u: `%s` is no address", line, text.c_str());
    std::string inner = trimmed(text.substr(1, text.size() - 2)), base = inner;
    Address a;
    size_t plus = inner.find('+');
    if (plus != std::string::npos) {
        base = trimmed(inner.substr(0, plus));
        a.offset = std::stoll(inner.substr(plus + 1), nullptr, 0);
    }
    if (base[0] == '%') a.has_register = true, a.base = find(base);
    else if (base[0] >= '0' && base[0] <= '9') a.offset += std::stoll(base, nullptr, 0);
    else if (symbols.count(base)) a.offset += symbols[base];
    else fault(-1, "line %u: what is %s?", line, base.c_str());
    return a;
}

void Decoder::set_address(Instruction& i, const std::string& text) {
    Address a = address(text);
    i.number = a.offset;
    i.address_bytes = a.has_register ? (u8)a.base.bytes : 8;
    i.at[i.operands++] = a.has_register ? (i32)a.base.number : constant(0, 8);
}

// `.reg .b32 %r<40>;` or `.reg .b32 a, b;`
void Decoder::declare_registers(const std::string& text) {
    std::vector<std::string> parts = words(text);
    u32 bytes = bytes_of_type(parts.at(1).substr(1));
    std::string names;
    for (size_t i = 2; i < parts.size(); i++) names += parts[i];
    auto declare = [&](const std::string& name) {
        registers[name] = {(u32)register_bytes.size(), bytes};
        register_bytes.push_back(bytes);
    };
    for (const std::string& name : pieces(names, ',')) {
        size_t count = name.find('<');
        if (count == std::string::npos) declare(name);
        else for (int k = 0; k < std::stoi(name.substr(count + 1)); k++) declare(name.substr(0, count) + std::to_string(k));
    }
}

// `.local .align 4 .b8 __local_depot0[16];`: a stack of each thread.
void Decoder::declare_local(const std::string& text) {
    std::map<std::string, u32> sizes, none;
    declare_shared(text, sizes, none);
    for (auto& [name, bytes] : sizes) {
        symbols[name] = (kernel.local_bytes + 15) / 16 * 16;
        kernel.local_bytes = symbols[name] + bytes;
    }
}

void Decoder::place_shared(std::map<std::string, u32> sizes, const std::map<std::string, u32>& dynamic) {
    u32 next = kernel.variables.empty() ? 1024 : kernel.variables.back().start + kernel.variables.back().bytes;
    for (auto& [name, bytes] : sizes) {
        // Apart from each other: whoever runs over the end of one must not land in the next.
        next = (next + 127) / 128 * 128 + (kernel.variables.empty() ? 0 : 128);
        kernel.variables.push_back({name, next, bytes});
        symbols[name] = next;
        kernel.shared_bytes += bytes;
        next += bytes;
    }
    for (auto& [name, _] : dynamic) symbols[name] = (64u << 10) + 1024;
}

// `.loc 2 65 80, function_name .., inlined_at 1 12 9`: the first is where the text stands.
void Decoder::location(const std::string& text) {
    std::vector<std::string> parts = words(text);
    u32 of = (u32)std::stoul(parts.at(2));
    if (of == 0) return;
    source_file = (u32)std::stoul(parts.at(1));
    source_line = of;
}

void Decoder::directive(const std::string& text) {
    std::string first = text.substr(0, text.find(' '));
    if (first == ".loc") location(text);
    else if (first == ".reg") declare_registers(text);
    else if (first == ".local") declare_local(text);
    else if (first == ".shared") {
        std::map<std::string, u32> sizes, none;
        declare_shared(text, sizes, none);
        place_shared(sizes, none);
    } else if (first == ".pragma") {
        size_t mask = text.find("used_bytes_mask");
        if (mask != std::string::npos) used_bytes = (u32)std::stoul(text.substr(mask + 15), nullptr, 0);
    } else {
        fault(-1, "line %u: this machine does not know %s", line, first.c_str());
    }
}

void Decoder::branch(Instruction& i, const std::string& target) {
    i.kind = Kind::Branch;
    i.is = Class::Control;
    jumps.push_back({(u32)kernel.code.size(), target});
}

// `{%r1,%r2}` into its parts; anything else alone.
std::vector<std::string> values_of(const std::string& text) {
    if (text.empty() || text[0] != '{') return {text};
    return pieces(text.substr(1, text.size() - 2), ',');
}

// A conversion may name a register that is wider than its type (9.7.9.21): it takes the lower part.
void Decoder::narrow(std::string& name, u32 bytes) {
    if (name[0] != '%' || find(name).bytes <= bytes) return;
    std::string part = name + ".low" + std::to_string(bytes);
    if (!registers.count(part)) {
        registers[part] = {(u32)register_bytes.size(), bytes};
        register_bytes.push_back(bytes);
    }
    Instruction cut;
    for (i32& at : cut.at) at = NONE;
    cut.line = line, cut.source_line = source_line, cut.source_file = source_file;
    plain(cut, "cut." + std::to_string(find(name).bytes) + "." + std::to_string(bytes), {part, name});
    kernel.code.push_back(cut);
    name = part;
}

void Decoder::plain(Instruction& i, const std::string& name, const std::vector<std::string>& operands) {
    auto found = meanings().find(name);
    if (found == meanings().end()) fault(-1, "line %u: this machine does not know %s", line, name.c_str());
    mean(i, found->second);
    std::vector<std::string> all;
    for (const std::string& o : operands) {
        for (const std::string& v : values_of(o)) {
            // A result and a predicate beside it.
            size_t bar = v.find('|');
            all.push_back(v.substr(0, bar));
            if (bar != std::string::npos) all.push_back(v.substr(bar + 1));
        }
    }
    const char* letters = found->second.operands;
    size_t equals = std::strcspn(letters, "="), wanted = std::strlen(letters) - 1;
    // A second result may be left out.
    if (equals == 2 && all.size() + 1 == wanted) all.insert(all.begin() + 1, "_");
    if (all.size() != wanted) fault(-1, "line %u: %s has %zu operands, not %zu", line, name.c_str(), wanted, all.size());
    i.results = (u8)equals;
    for (size_t k = 0; k < wanted; k++) {
        u32 bytes = bytes_of_letter(letters[k < equals ? k : k + 1]);
        if (all[k] == "_") {
            // A register that nobody reads.
            i.at[i.operands++] = (i32)register_bytes.size();
            register_bytes.push_back(bytes);
            continue;
        }
        if (all[k][0] == '!') fault(-1, "line %u: this machine does not know negated operands", line);
        if (k >= equals && name.rfind("cvt.", 0) == 0) narrow(all[k], bytes);
        add(i, all[k], bytes);
    }
    if (i.kind == Kind::Together && name.rfind("mma", 0) && name.rfind("ldmatrix", 0)) i.members = i.at[i.operands - 1];
}

// mov: of registers, of what a thread knows of itself, of addresses, and of halves.
void Decoder::moved(Instruction& i, std::string name, std::vector<std::string> operands) {
    bool packs = operands.at(1)[0] == '{', unpacks = operands.at(0)[0] == '{';
    std::string halves = (packs ? "pack." : "unpack.") + name.substr(name.rfind('.') + 1);
    if (packs || unpacks) return plain(i, halves, operands);
    bool is_special = operands[1][0] == '%' && !registers.count(operands[1]);
    if (!is_special) return plain(i, name, operands);
    plain(i, "mov." + operands[1], {operands[0]});
}

void Decoder::accessed(Instruction& i, const std::vector<std::string>& name, std::vector<std::string> operands) {
    bool writes = name[0] == "st";
    i.run = writes ? store : load;
    for (size_t k = 1; k + 1 < name.size(); k++) {
        const std::string& part = name[k];
        if (part == "global") i.space = Space::Global;
        else if (part == "shared") i.space = Space::Shared;
        else if (part == "local") i.space = Space::Local;
        else if (part == "param") i.space = Space::Param;
        else if (part == "v2" || part == "v4") i.values = (u8)(part[1] - '0');
        else if (part == "volatile" || part == "acquire" || part == "relaxed") i.kind = writes ? Kind::Plain : Kind::Poll;
        else {
            static const std::set<std::string> told = {"release", "gpu", "sys", "cta", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"};
            if (!told.count(part)) fault(-1, "line %u: this machine does not know .%s", line, part.c_str());
        }
    }
    const std::string& type = name.back();
    i.bytes = (u8)bytes_of_type(type);
    i.is_signed = type[0] == 's';
    i.is = i.space == Space::Shared ? Class::Shared : i.space == Space::Param ? Class::Move : Class::Global;
    i.used_bytes = used_bytes;
    used_bytes = ALL;
    std::vector<std::string> values = values_of(operands.at(writes ? 1 : 0));
    const std::string& where = operands.at(writes ? 0 : 1);
    if (values.size() != i.values) fault(-1, "line %u: %zu values, not %u", line, values.size(), i.values);
    auto width = [&](const std::string& v) { return v[0] == '%' ? find(v).bytes : i.bytes < 2 ? 2u : (u32)i.bytes; };
    i.register_bytes = (u8)width(values[0]);
    if (i.space == Space::Param) {
        std::string prefix = "[" + kernel.name + "_param_";
        if (where.rfind(prefix, 0)) fault(-1, "line %u: a parameter's address is computed", line);
        size_t index = std::stoul(where.substr(prefix.size()));
        i.run = load_parameter;
        i.number = kernel.parameter_offsets.at(index);
    }
    i.results = writes ? 0 : i.values;
    if (!writes) for (const std::string& v : values) add(i, v, i.register_bytes);
    if (i.space != Space::Param) set_address(i, where);
    if (writes) for (const std::string& v : values) add(i, v, i.register_bytes);
}

// cp.async.cg.shared.global [to], [from], 16, given;
void Decoder::copied(Instruction& i, const std::vector<std::string>& operands) {
    i.run = copy_async;
    i.is = Class::Copy;
    if (operands.size() < 3) fault(-1, "line %u: a copy of how many bytes?", line);
    Address to = address(operands[0]), from = address(operands[1]);
    if (!to.has_register || !from.has_register || to.offset || from.offset || to.base.bytes != 4 || from.base.bytes != 8) {
        fault(-1, "line %u: a copy between other addresses than a shared and a global register", line);
    }
    i.bytes = (u8)std::stoul(operands[2]);
    i.at[i.operands++] = (i32)to.base.number;
    i.at[i.operands++] = (i32)from.base.number;
    add(i, operands.size() > 3 ? operands[3] : operands[2], 4);
}

// atom.global.add.u32 d, [a], b; red.. without d.
void Decoder::exchanged(Instruction& i, const std::vector<std::string>& name, const std::vector<std::string>& operands) {
    bool returns = name[0] == "atom";
    std::string operation;
    static const std::set<std::string> known = {"add", "exch", "cas", "min", "max", "and", "or", "xor", "inc", "dec"};
    for (const std::string& part : name) {
        if (part == "global") i.space = Space::Global;
        else if (part == "shared") i.space = Space::Shared;
        else if (known.count(part)) operation = part;
    }
    i.is = i.space == Space::Shared ? Class::Shared : Class::Global;
    i.kind = returns ? Kind::Poll : Kind::Plain;
    i.bytes = i.register_bytes = (u8)bytes_of_type(name.back());
    i.run = atomic(operation, name.back(), i.space);
    if (!i.run) fault(-1, "line %u: this machine does not know the atomic %s.%s", line, operation.c_str(), name.back().c_str());
    i.results = 1;
    if (returns) add(i, operands.at(0), i.bytes);
    else i.at[i.operands++] = (i32)register_bytes.size(), register_bytes.push_back(i.bytes);
    set_address(i, operands.at(returns ? 1 : 0));
    for (size_t k = returns ? 2 : 1; k < operands.size(); k++) add(i, operands[k], i.bytes);
}

void Decoder::instruction(std::string text) {
    Instruction i;
    for (i32& at : i.at) at = NONE;
    i.line = line, i.source_line = source_line, i.source_file = source_file;
    if (text[0] == '@') {
        size_t space = text.find(' ');
        i.guard_is_not = text[1] == '!';
        i.guard = (i32)find(text.substr(i.guard_is_not ? 2 : 1, space - (i.guard_is_not ? 2 : 1))).number;
        text = trimmed(text.substr(space));
    }
    size_t space = text.find(' ');
    std::string name = text.substr(0, space);
    std::vector<std::string> operands = space == std::string::npos ? std::vector<std::string>{} : pieces(text.substr(space), ',');
    std::vector<std::string> parts = pieces(name, '.');
    const std::string& op = parts[0];
    if (op == "bra") branch(i, operands.at(0));
    else if (op == "ret" || op == "exit") i.kind = Kind::Exit, i.is = Class::Control;
    else if (op == "mov") moved(i, name, operands);
    else if (op == "ld" || op == "st") accessed(i, parts, operands);
    else if (op == "atom" || op == "red") exchanged(i, parts, operands);
    else if (name == "cp.async.ca.shared.global" || name == "cp.async.cg.shared.global") copied(i, operands);
    else if (name == "cp.async.wait_group" || name == "cp.async.wait_all") {
        i.run = copy_wait, i.is = Class::Copy;
        i.number = name == "cp.async.wait_all" ? -1 : std::stoi(operands.at(0));
    } else if (name == "bar.sync" || name == "barrier.sync") {
        if (operands != std::vector<std::string>{"0"}) fault(-1, "line %u: this machine knows barrier 0 of all threads alone", line);
        i.kind = Kind::BlockBarrier, i.is = Class::Control;
    } else if (op == "ldmatrix") {
        bool turns = name.find(".trans.") != std::string::npos;
        mean(i, {turns ? load_matrices_transposed : load_matrices, "", Class::Matrices, Kind::Together});
        if (name.rfind("ldmatrix.sync.aligned.m8n8.x4.", 0)) fault(-1, "line %u: this machine does not know %s", line, name.c_str());
        i.values = 4, i.results = 4;
        for (const std::string& v : values_of(operands.at(0))) add(i, v, 4);
        set_address(i, operands.at(1));
    } else plain(i, name, operands);
    kernel.waits_for_blocks |= i.kind == Kind::Poll;
    kernel.code.push_back(i);
}

void Decoder::run() {
    place_shared(unit.shared, unit.dynamic);
    Statements statements{unit.text, kernel.begin, kernel.end, kernel.first_line};
    for (Statement s; statements.next(s);) {
        line = s.line;
        if (s.is_label) labels[s.text] = (u32)kernel.code.size();
        else if (s.text == "{" || s.text == "}") continue;
        else if (s.text[0] == '.') directive(s.text);
        else instruction(s.text);
    }
    instruction("ret");
    for (auto& [at, label] : jumps) {
        if (!labels.count(label)) fault(-1, "no label %s", label.c_str());
        kernel.code[at].target = labels[label];
    }
    place_registers(kernel, register_bytes);
}

}  // namespace

void decode(const Unit& unit, Kernel& kernel) {
    Decoder(unit, kernel).run();
    kernel.is_decoded = true;
}

}  // namespace ptx
