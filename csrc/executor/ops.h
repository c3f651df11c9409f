// One function per op of the table (headrace/ops.py): reads its inputs from scratch, writes its outputs there.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "executor/executor.h"
#include "executor/mapping.h"
#include "executor/program.h"
#include "executor/thread_pool.h"
#include "executor/weights.h"
#include "experts/expert_memory.h"
#include "kernels/kernels.h"
#include "support/error.h"

namespace headrace {

// Distinct experts of one layer, ascending, and the routes of each in row order (CSR; EStream Algorithm 1). Route p has
// row rows[p] and weight weights[p]; expert e of the list has the routes [first[e], first[e + 1]).
struct RouteMap {
  std::vector<uint32_t> experts, num_routes, first, rows;
  std::vector<float> weights;
  std::vector<uint32_t> route_of;  // [row * top_k + j]: where row's j-th choice stands
  std::vector<uint32_t> next;      // while it is built: counts, then cursors, by expert id
};

// Routes [route, route + num_routes) of one expert in a ready slot, worked on in places [place, ...) of the workspace.
struct ExpertJob {
  uint32_t expert;  // index into RouteMap::experts
  const uint8_t* slot;
  uint32_t route, place, num_routes;
};

// Row pointers, as kernels take them.
struct RowPointers {
  std::vector<const void*> x, h;         // inputs of a linear, or of gate and up; of down
  std::vector<float*> y, gate, up, out;  // their outputs; y: row after row of one linear, then of the next
};

// What ops need beside values, allocated once for the largest pass.
struct OpBuffers {
  RouteMap routes;
  RowPointers rows;
  std::vector<uint32_t> order;         // of rows: by token, by sequence
  std::vector<uint32_t> chunks;        // of attention: where each begins in `order`, and the end
  std::unique_ptr<Mapping> attention;  // the kernel's scratch, per thread
  std::unique_ptr<Mapping> output;     // logits of some rows and columns, per thread, and what was made of them
  std::vector<uint32_t> taken;         // by ExpertMemory::take
  std::vector<ExpertJob> jobs;
};

// One pass, as every op sees it.
struct PassContext {
  const Program& program;
  const Weights& weights;
  ExpertMemory* experts;
  const Kernels& kernels;
  ThreadPool& pool;
  uint8_t* scratch;
  OpBuffers& buffers;
  const Pass& pass;
  const std::vector<uint32_t>& positions;  // of each row, in its sequence
  std::atomic<bool>& stopping;             // the calling thread has been told to stop

  uint32_t num_rows(uint32_t value) const;
  float* f32(uint32_t value, uint32_t row = 0) const;
  int32_t* i32(uint32_t value, uint32_t row = 0) const;
  uint8_t* bytes(uint32_t value, uint32_t row = 0) const;  // any kind
  // Throws Cancelled if the caller wants the pass to end. Only the calling thread (0) asks it; the others follow.
  void poll(uint32_t thread = 0) const {
    if (thread == 0 && pass.should_stop && pass.should_stop()) stopping.store(true, std::memory_order_relaxed);
    if (stopping.load(std::memory_order_relaxed)) throw Cancelled();
  }
  // parallel_for over rows whose work is about `row_work` floats each: few rows stay on the calling thread.
  template <class Fn>
  void each_row(uint32_t rows, uint64_t row_work, Fn fn) const {
    constexpr uint64_t kWorkPerChunk = 16384;
    uint32_t grain = static_cast<uint32_t>(1 + kWorkPerChunk / row_work);
    pool.parallel_for(rows, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
      poll(thread);
      for (uint32_t row = begin; row < end; ++row) fn(row);
    });
  }
};

// y[t] = W x[t] for tiles [tile_begin, tile_end) and all n rows, on this thread.
void matmul_rows(const PassContext& ctx, const Matrix& w, const void* const* x, uint32_t n, float* const* y,
                 uint32_t tile_begin, uint32_t tile_end, uint32_t thread);

void run_embed(const PassContext& ctx, const OpInfo& op);
void run_rms_norm(const PassContext& ctx, const OpInfo& op);
void run_quantize(const PassContext& ctx, const OpInfo& op);
void run_linears(const PassContext& ctx, std::span<const OpInfo> ops);  // of one x
void run_rope_angles(const PassContext& ctx, const OpInfo& op);
void run_rope(const PassContext& ctx, const OpInfo& op);
void run_attention(const PassContext& ctx, const OpInfo& op);  // op_attention.cc
void run_add(const PassContext& ctx, const OpInfo& op);
void run_route(const PassContext& ctx, const OpInfo& op);
void run_experts(const PassContext& ctx, const OpInfo& op);  // op_experts.cc
void run_select_rows(const PassContext& ctx, const OpInfo& op);
void run_output(const PassContext& ctx, const OpInfo& op);  // op_output.cc

// The linears that begin at op `first` and read the same value, and whose outputs share no memory: none, one or more.
constexpr size_t kMostLinears = 4;
std::span<const OpInfo> linears_from(const Program& program, size_t first);

// Made with the executor: buffers for the largest pass, grown for each of its programs, and Error if the experts'
// layers do not fit the program.
uint64_t attention_buffer_bytes(const Program& program, uint32_t num_threads);
uint64_t expert_buffer_bytes(const Program& program, uint32_t max_rows);  // of what grows with the rows
void size_attention_buffers(const Program& program, uint32_t num_threads, OpBuffers& buffers);
void size_expert_buffers(const Program& program, OpBuffers& buffers);
uint64_t output_buffer_bytes(const Program& program, uint32_t num_threads);
void size_output_buffers(const Program& program, uint32_t num_threads, OpBuffers& buffers);
void check_experts(const Program& program, const ExpertMemory* experts);

}  // namespace headrace
