// The C functions of the engine. `words` are described at Problem; 0 if all went well, 1 if memory ran out.
#include "derivatives.hpp"
#include "forward.hpp"
#include "statistics.hpp"

static int answer(void (*kernel)(const Problem&), const int64_t* words, double scale, double rate) {
  try {
    Problem z(words, scale, rate);
    kernel(z);
    return z.failed;
  } catch (const std::bad_alloc&) { return 1; }
}

#define API extern "C" __attribute__((visibility("default")))

API void cumulant_use_pool(Parallel pool) { torch_pool = pool; }
API const char* cumulant_sources() { return CUMULANT_SOURCES; }  // a digest of the sources, from the build
#define KERNEL(name)                                                                                                                \
  API int cumulant_##name##_f32(const int64_t* words, double scale, double rate) { return answer(name<float>, words, scale, rate); }   \
  API int cumulant_##name##_f64(const int64_t* words, double scale, double rate) { return answer(name<double>, words, scale, rate); }
KERNEL(forward)
KERNEL(tangent)
KERNEL(gradient)
KERNEL(curvature)
KERNEL(statistics)
