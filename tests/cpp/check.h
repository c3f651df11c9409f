// A test harness in one header: CHECK records a failure and goes on, TEST registers a case, main runs them all.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  std::function<void()> run;
};
inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int& failures() {
  static int n = 0;
  return n;
}
struct Register {
  Register(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};
inline void fail(const char* file, int line, const std::string& what) {
  ++failures();
  if (failures() <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}
template <class A, class B>
std::string show(const char* text, const A& a, const B& b) {
  std::ostringstream out;
  out << text << ": " << a << " vs " << b;
  return out.str();
}

}  // namespace check

#define CHECK_CAT2(a, b) a##b
#define CHECK_CAT(a, b) CHECK_CAT2(a, b)
#define TEST(name)                                                                    \
  static void CHECK_CAT(test_, __LINE__)();                                           \
  static check::Register CHECK_CAT(reg_, __LINE__)(name, CHECK_CAT(test_, __LINE__)); \
  static void CHECK_CAT(test_, __LINE__)()
#define CHECK(cond)                                               \
  do {                                                            \
    if (!(cond)) check::fail(__FILE__, __LINE__, "CHECK " #cond); \
  } while (0)
#define CHECK_EQ(a, b)                                                                                       \
  do {                                                                                                       \
    const auto& check_a = (a);                                                                               \
    const auto& check_b = (b);                                                                               \
    if (!(check_a == check_b)) check::fail(__FILE__, __LINE__, check::show(#a " == " #b, check_a, check_b)); \
  } while (0)
// The statement throws Exception and its message contains `part`.
#define CHECK_THROWS(Exception, part, statement)                                                              \
  do {                                                                                                        \
    try {                                                                                                     \
      statement;                                                                                              \
      check::fail(__FILE__, __LINE__, "expected " #Exception " from " #statement);                            \
    } catch (const Exception& e) {                                                                            \
      if (!std::strstr(e.what(), part)) check::fail(__FILE__, __LINE__, std::string("message: ") + e.what()); \
    }                                                                                                         \
  } while (0)

int main(int argc, char** argv) {
  int ran = 0;
  for (auto& c : check::cases()) {
    if (argc > 1 && !std::strstr(c.name, argv[1])) continue;
    int before = check::failures();
    c.run();
    ++ran;
    std::printf("%s %s\n", check::failures() == before ? "ok  " : "FAIL", c.name);
  }
  std::printf("%d tests, %d failures\n", ran, check::failures());
  return check::failures() != 0 || ran == 0;
}
