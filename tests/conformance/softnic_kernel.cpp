// In a program with this file SoftNIC is a kernel, where no GPU is: the ranks' memory is that of
// fake_gpu.cpp, and the executor runs all kernels, SoftNIC's among them.
#include "conformance/harness.hpp"

namespace belfry::conformance {
namespace {

[[maybe_unused]] const bool adapted_before_main = [] {
  adapt_options = [](CommOptions& o) {
    o.gpu = 0;
    o.softnic.engine = SoftnicEngine::kernel;
    if (o.softnic.ctas == CommOptions{}.softnic.ctas) o.softnic.ctas = 1;
    // Faults that it has not.
    o.softnic.reorder = 0;
    o.softnic.slow_doorbell = 0;
  };
  return true;
}();

}  // namespace
}  // namespace belfry::conformance
