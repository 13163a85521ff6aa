// Between the parts of the machine that read text.
#pragma once
#include "machine.h"

namespace ptx {

std::string trimmed(const std::string& text);
std::vector<std::string> pieces(const std::string& text, char separator);
std::vector<std::string> words(const std::string& text);
u32 bytes_of_type(const std::string& type);
// `.shared` with its bytes, among `dynamic` where these are asked for at a launch.
void declare_shared(const std::string& text, std::map<std::string, u32>& sizes, std::map<std::string, u32>& dynamic);

struct Statement {
    std::string text;
    u32 line = 0;
    bool is_label = false;
};

// The statements of a kernel's body, one by one.
struct Statements {
    const char* text;
    size_t at, end;
    u32 line;
    bool next(Statement& s);
};

}  // namespace ptx
