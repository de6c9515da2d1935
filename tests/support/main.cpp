#include <iostream>

#include <doctest/doctest.h>

int main(int argc, char** argv) {
  // What a test had done and found is known, too, when it hangs and is killed.
  std::cout << std::unitbuf;
  doctest::Context context;
  context.setOption("duration", true);
  context.applyCommandLine(argc, argv);
  return context.run();
}
