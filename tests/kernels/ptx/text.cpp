// The text of PTX: kernels, statements, operands.
#include "text.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ptx {

void fault(int lane, const char* format, ...) {
    char what[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    throw Fault{what, lane};
}

namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

}  // namespace

std::string trimmed(const std::string& text) {
    size_t begin = 0, end = text.size();
    while (begin < end && is_space(text[begin])) begin++;
    while (end > begin && is_space(text[end - 1])) end--;
    return text.substr(begin, end - begin);
}

// Pieces between separators that stand outside of brackets.
std::vector<std::string> pieces(const std::string& text, char separator) {
    std::vector<std::string> found;
    int depth = 0;
    std::string piece;
    for (char c : text) {
        depth += c == '{' || c == '[' || c == '(' ? 1 : c == '}' || c == ']' || c == ')' ? -1 : 0;
        if (c == separator && depth == 0) {
            found.push_back(trimmed(piece));
            piece.clear();
        } else {
            piece += c;
        }
    }
    piece = trimmed(piece);
    if (!piece.empty() || !found.empty()) found.push_back(piece);
    return found;
}

std::vector<std::string> words(const std::string& text) {
    std::vector<std::string> found;
    std::string word;
    for (char c : text + " ") {
        if (!is_space(c)) word += c;
        else if (!word.empty()) found.push_back(word), word.clear();
    }
    return found;
}

u32 bytes_of_type(const std::string& type) {
    if (type == "pred") return 1;
    size_t digit = type.find_first_of("0123456789");
    if (digit == std::string::npos) return 0;
    return (u32)std::atoi(type.c_str() + digit) / 8;
}

// The next statement: up to `;`, the `:` of a label, a brace, or the end of a line that says where the code comes from.
bool Statements::next(Statement& s) {
    s = {};
    int depth = 0;
    while (at < end) {
        char c = text[at];
        if (c == '/' && text[at + 1] == '/') {
            while (at < end && text[at] != '\n') at++;
            continue;
        }
        at++;
        line += c == '\n';
        if (c == '\n' && s.text.rfind(".loc", 0) == 0) return true;
        if (s.text.empty()) {
            if (is_space(c) || c == ';') continue;
            s.line = line;
            if (c == '{' || c == '}') return s.text = c, true;
        }
        depth += c == '{' ? 1 : c == '}' ? -1 : 0;
        if (c == ';' && depth == 0) return s.text = trimmed(s.text), true;
        bool is_name = s.text.find_first_of(" @.") == std::string::npos;
        if (c == ':' && is_name) return s.is_label = true;
        s.text += is_space(c) ? ' ' : c;
    }
    return false;
}

namespace {

// `.param .u64 name` in the list of an entry.
void add_parameter(Kernel& kernel, const std::string& text) {
    std::vector<std::string> parts = words(text);
    std::string type = parts.size() > 1 ? parts[1].substr(1) : "";
    u32 bytes = bytes_of_type(type);
    if (parts.size() < 3 || parts[0] != ".param" || !bytes || text.find('[') != std::string::npos) {
        fault(-1, "%s: a parameter that is no number: `%s`", kernel.name.c_str(), text.c_str());
    }
    kernel.parameter_bytes = (kernel.parameter_bytes + bytes - 1) / bytes * bytes;
    kernel.parameters.push_back({type[0] == 'f' ? 2u : 1u, bytes});
    kernel.parameter_offsets.push_back(kernel.parameter_bytes);
    kernel.parameter_bytes += bytes;
}

// `.shared .align 4 .b8 name[132]`, anywhere: its bytes, 0 where they are asked for at a launch.
void add_shared(const std::string& text, std::string& name, u32& align, u32& bytes) {
    std::vector<std::string> parts = words(text);
    align = 4;
    u32 each = 1;
    for (size_t i = 0; i < parts.size(); i++) {
        if (parts[i] == ".align") align = (u32)std::stoul(parts[++i]);
        else if (parts[i][0] == '.' && bytes_of_type(parts[i].substr(1))) each = bytes_of_type(parts[i].substr(1));
    }
    name = parts.back();
    size_t bracket = name.find('[');
    u32 count = 1;
    if (bracket != std::string::npos) {
        count = name[bracket + 1] == ']' ? 0 : (u32)std::stoul(name.substr(bracket + 1));
        name.resize(bracket);
    }
    bytes = each * count;
}

}  // namespace

void declare_shared(const std::string& text, std::map<std::string, u32>& sizes, std::map<std::string, u32>& dynamic) {
    std::string name;
    u32 align, bytes;
    add_shared(text, name, align, bytes);
    (bytes ? sizes : dynamic)[name] = bytes;
}

void parse(Unit& unit, std::map<std::string, Kernel>& kernels) {
    const char* text = unit.text;
    size_t length = std::strlen(text);
    u32 line = 1;
    for (size_t at = 0; at < length;) {
        size_t end = at;
        while (end < length && text[end] != '\n') end++;
        std::string row = trimmed(std::string(text + at, end - at));
        size_t entry = row.find(".entry ");
        if (row.rfind(".file", 0) == 0) {
            size_t quote = row.find('"'), slash = row.rfind('/'), last = row.rfind('"');
            size_t from = slash == std::string::npos ? quote + 1 : slash + 1;
            unit.files[(u32)std::stoul(row.substr(5))] = row.substr(from, last - from);
        } else if (row.rfind("//", 0) != 0 && row.find(".shared ") != std::string::npos && entry == std::string::npos) {
            if (row.back() == ';') row.pop_back();
            declare_shared(row, unit.shared, unit.dynamic);
        } else if (entry != std::string::npos && row.rfind("//", 0) != 0) {
            Kernel kernel;
            size_t open = at + (size_t)(std::strchr(text + at, '(') - (text + at));
            kernel.name = trimmed(std::string(text + at, open - at).substr(std::string(text + at, open - at).find(".entry ") + 7));
            kernel.unit = unit.name;
            size_t close = open + (size_t)(std::strchr(text + open, ')') - (text + open));
            for (const std::string& p : pieces(std::string(text + open + 1, close - open - 1), ',')) add_parameter(kernel, p);
            size_t body = close + (size_t)(std::strchr(text + close, '{') - (text + close));
            int depth = 0;
            size_t i = body;
            for (;; i++) {
                depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
                if (depth == 0 || i + 1 >= length) break;
            }
            for (size_t k = at; k < body; k++) line += text[k] == '\n';
            kernel.begin = body + 1, kernel.end = i, kernel.first_line = line;
            for (size_t k = body; k < i; k++) line += text[k] == '\n';
            end = i;
            while (end < length && text[end] != '\n') end++;
            kernels[kernel.name] = kernel;
        }
        at = end + 1;
        line++;
    }
}

}  // namespace ptx
