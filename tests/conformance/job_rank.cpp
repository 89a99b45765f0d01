// One rank, a process of its own, of the matrix's jobs, one communicator after the other.
//   job_rank PATH MODE ["gpu"]
//
// With "gpu" the windows are a GPU's, and SoftNIC's engine runs on the CPU.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "conformance/shapes.hpp"
#include "path/choose.hpp"

int main(int argc, char** argv) {
  using namespace belfry;
  using namespace belfry::conformance;
  if (argc != 3 && argc != 4) return 2;
  try {
    const Path path = path::parse_path(argv[1], "argument 1");
    const std::string name = argv[2];
    const simt::Mode mode = name == "threads" ? simt::Mode::threads : simt::Mode::cooperative;
    const std::shared_ptr<Bootstrap> bootstrap = from_environment();
    Shape base = shape_of(path, mode, bootstrap->ranks(), true);
    if (argc == 4) {
      base.options.gpu = 0;
      base.options.softnic.engine = SoftnicEngine::cpu;
    }
    std::vector<Shape> shapes{every_operation(base), warps_and_blocks(base), four_blocks(base)};
    for (const std::uint64_t first : first_indices) shapes.push_back(near_a_wrap(base, first));
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      // Refused: their signals would go by the NIC, those of the others by stores.
      if (argc == 4 && path == Path::lsa) shapes[i].shared.assign(shapes[i].shared.size(), true);
      const std::string error = run_job_as_rank(shapes[i], bootstrap);
      if (error.empty()) continue;
      std::printf("rank %d, job %zu: %s\n", bootstrap->rank(), i, error.c_str());
      bootstrap->fail(error);
      return 3;
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 5;
  }
  return 0;
}
