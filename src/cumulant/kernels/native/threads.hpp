// Who works: torch's own pool, by the C function torch_parallel_for of libtorch_cpu, so torch.set_num_threads is obeyed and
// no second OpenMP appears; own threads where torch does not export it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int (*Parallel)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
inline Parallel torch_pool = nullptr;  // one for all sources of the library

// Scratch memory of one thread, kept from call to call up to a limit: fresh pages cost as much as arithmetic.
class Arena {
  struct Chunk { char* base; size_t size; };
  std::vector<Chunk> chunks;
  size_t at = 0, used = 0, total = 0, last = 0;
  int tasks = 0;
  void add(size_t size) {
    void* base = aligned_alloc(64, size);
    if (!base) throw std::bad_alloc();
    chunks.push_back({(char*)base, size});
    total += size;
  }

 public:
  ~Arena() { release(); }
  void release() {
    for (Chunk& c : chunks) free(c.base);
    chunks.clear();
    at = used = total = 0;
  }
  // Tasks that need ever more would leave ever more behind: then one chunk, half as large again.
  void reset() {
    const size_t size = (total + total / 2) / 64 * 64;
    if (tasks++ > 1 && total > last) release(), add(size);
    at = used = 0, last = total;
  }
  void begin() { tasks = 0; }
  void settle() { if (total > (size_t(8) << 20)) release(); }
  template <class T> T* take(int64_t count) {
    size_t bytes = (size_t(count) * sizeof(T) + 127) / 64 * 64;
    while (at < chunks.size() && used + bytes > chunks[at].size) at++, used = 0;
    if (at == chunks.size()) add(bytes > (size_t(1) << 18) ? bytes : size_t(1) << 18);
    T* out = (T*)(chunks[at].base + used);
    used += bytes;
    return out;
  }
};

// Sums that several tasks add to are added in the order of the tasks, tile by tile: the same bits for any number of threads.
// Tasks are handed out in that order, so whoever is waited for is running.
class Turns {
  std::unique_ptr<std::atomic<int64_t>[]> next;

 public:
  const int64_t tiles;
  Turns(int64_t units, int64_t tiles) : next(new std::atomic<int64_t>[size_t(units * tiles)]()), tiles(tiles) {}
  void wait(int64_t unit, int64_t tile, int64_t turn, const std::atomic<bool>& failed) {
    for (int spins = 0; next[unit * tiles + tile].load(std::memory_order_acquire) != turn && !failed; spins++)
      if (spins > 64) std::this_thread::yield();
  }
  void pass(int64_t unit, int64_t tile, int64_t turn) { next[unit * tiles + tile].store(turn + 1, std::memory_order_release); }
};

// f(task, arena) for every task; false if memory ran out.
template <class F> static bool run_tasks(int64_t count, int64_t threads, std::atomic<bool>& failed, F f) {
  struct Context { std::atomic<int64_t> next; int64_t count; std::atomic<bool>* failed; F* f; } context{{0}, count, &failed, &f};
  auto body = [](int64_t, int64_t, void* p) {
    Context& c = *(Context*)p;
    static thread_local Arena arena;
#if defined(__x86_64__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8000);  // products too small for a normal number are zero, not slow
#endif
    arena.begin();
    try {
      for (int64_t task; (task = c.next++) < c.count && !*c.failed;) arena.reset(), (*c.f)(task, arena);
    } catch (const std::bad_alloc&) { *c.failed = true; }
    arena.settle();
#if defined(__x86_64__)
    _mm_setcsr(mode);
#endif
  };
  int64_t workers = std::min(threads, count);
  if (workers <= 1) body(0, 1, &context);
  else if (torch_pool) torch_pool(0, workers, 1, body, &context);
  else {
    std::vector<std::thread> others;
    for (int64_t i = 1; i < workers; i++) others.emplace_back(body, i, i + 1, &context);
    body(0, 1, &context);
    for (std::thread& t : others) t.join();
  }
  return !failed;
}
