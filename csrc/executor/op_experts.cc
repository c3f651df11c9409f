// The routed experts of one layer (EStream, Algorithm 1): routes and slot addresses are bound here, at call time.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "executor/ops.h"

namespace headrace {

namespace {

constexpr size_t kSlotPieceBytes = 256 << 10;  // a quarter of a 1 MiB L2 cache

// The op's attributes and values, by name.
struct ExpertsOp {
  uint32_t x, ids, weights, y, workspace;  // values
  uint32_t layer, num_experts, width, hidden, top_k, capacity;

  ExpertsOp(const Program& program, const OpInfo& op)
      : x(op.inputs[0]),
        ids(op.inputs[1]),
        weights(op.inputs[2]),
        y(op.outputs[0]),
        workspace(op.outputs[1]),
        layer(static_cast<uint32_t>(op.attr_int[attr_experts::kLayer])),
        num_experts(static_cast<uint32_t>(op.attr_int[attr_experts::kNumExperts])),
        width(static_cast<uint32_t>(op.attr_int[attr_experts::kMoeIntermediateSize])),
        hidden(static_cast<uint32_t>(program.values[y].width)),
        top_k(static_cast<uint32_t>(program.values[ids].width)),
        capacity(static_cast<uint32_t>(op.attr_int[attr_experts::kRouteCapacity])) {}
};

// Counting sort of the routes by expert; within an expert they stay in row order.
void build_route_map(const PassContext& ctx, const ExpertsOp& op, uint32_t num_rows, RouteMap& map) {
  const uint32_t num_routes = num_rows * op.top_k;
  const int32_t* ids = ctx.i32(op.ids);
  const float* weights = ctx.f32(op.weights);
  map.next.assign(op.num_experts, 0);
  for (uint32_t i = 0; i < num_routes; ++i) {
    const bool ascends = i % op.top_k == 0 || ids[i] > ids[i - 1];
    if (ids[i] < 0 || static_cast<uint32_t>(ids[i]) >= op.num_experts || !ascends)
      throw Error("experts of layer " + std::to_string(op.layer) + ": route to expert " + std::to_string(ids[i]) +
                  " of " + std::to_string(op.num_experts) + ", expected ascending ids");
    ++map.next[ids[i]];
  }
  map.experts.clear();
  map.num_routes.clear();
  map.first.clear();
  uint32_t total = 0;
  for (uint32_t e = 0; e < op.num_experts; ++e) {
    const uint32_t count = map.next[e];
    map.next[e] = total;
    if (count == 0) continue;
    map.experts.push_back(e);
    map.num_routes.push_back(count);
    map.first.push_back(total);
    total += count;
  }
  map.first.push_back(total);
  for (uint32_t i = 0; i < num_routes; ++i) {
    const uint32_t p = map.next[ids[i]]++;
    map.rows[p] = i / op.top_k;
    map.weights[p] = weights[i];
    map.route_of[i] = p;
  }
}

class ExpertsPass {
 public:
  ExpertsPass(const PassContext& ctx, const OpInfo& info)
      : ctx_(ctx),
        op_(ctx.program, info),
        source_(ctx.experts->source().layers[op_.layer]),
        num_rows_(ctx.num_rows(op_.y)),
        map_(ctx.buffers.routes),
        rows_(ctx.buffers.rows) {
    for (int i = 0; i < 3; ++i) offsets_[i] = part_offset(source_, i);
  }

  void run() {
    if (num_rows_ == 0) return;
    build_route_map(ctx_, op_, num_rows_, map_);
    const uint32_t num_routes = num_rows_ * op_.top_k;
    bind_workspace(std::min(num_routes, op_.capacity));
    jobs_.clear();
    ctx_.experts->begin(op_.layer, map_.experts, map_.num_routes);
    struct End {
      ExpertMemory& memory;
      ~End() { memory.end(); }
    } end{*ctx_.experts};
    if (num_routes <= op_.capacity) {
      run_as_ready();
    } else {
      run_in_storage_order();
    }
  }

 private:
  // Every route's output is kept, so experts may come in any order; the sums are formed at the end, in one order.
  void run_as_ready() {
    while (take(/*in_order=*/false)) {
      for (uint32_t i : ctx_.buffers.taken) add_job(i, map_.first[i], map_.first[i], map_.first[i + 1] - map_.first[i]);
      compute();
      finish_jobs();
    }
    ctx_.each_row(num_rows_, uint64_t{op_.top_k} * op_.hidden, [&](uint32_t row) {
      float* y = ctx_.f32(op_.y, row);
      std::memset(y, 0, op_.hidden * sizeof(float));
      for (uint32_t j = 0; j < op_.top_k; ++j) {  // ids ascend within a row
        const uint32_t route = map_.route_of[row * op_.top_k + j];
        ctx_.kernels.accumulate(map_.weights[route], rows_.out[route], y, op_.hidden);
      }
    });
  }

  // More routes than the workspace holds: experts come in ascending order, as many at a time as it does hold, straight
  // into the sums. One with more routes than that takes several rounds.
  void run_in_storage_order() {
    ctx_.each_row(num_rows_, op_.hidden,
                  [&](uint32_t row) { std::memset(ctx_.f32(op_.y, row), 0, op_.hidden * sizeof(float)); });
    uint32_t places = 0;
    const auto run_jobs = [&] {
      compute();
      for (const ExpertJob& job : jobs_) accumulate(job);
      finish_jobs();
      places = 0;
    };
    while (take(/*in_order=*/true)) {
      for (uint32_t i : ctx_.buffers.taken) {
        const uint32_t end = map_.first[i + 1];
        if (end - map_.first[i] > op_.capacity - places) run_jobs();
        for (uint32_t route = map_.first[i]; route < end;) {
          const uint32_t n = std::min(end - route, op_.capacity - places);
          add_job(i, route, places, n);
          route += n;
          places += n;
          if (places == op_.capacity) run_jobs();
        }
      }
      run_jobs();
    }
  }

  void add_job(uint32_t expert, uint32_t route, uint32_t place, uint32_t num_routes) {
    jobs_.push_back({expert, ctx_.experts->address(expert), route, place, num_routes});
    for (uint32_t i = 0; i < num_routes; ++i) rows_.x[place + i] = ctx_.bytes(op_.x, map_.rows[route + i]);
  }

  // Slots whose last reader is done go back.
  void finish_jobs() {
    for (const ExpertJob& job : jobs_)
      if (job.route + job.num_routes == map_.first[job.expert + 1]) ctx_.experts->release(job.expert);
    jobs_.clear();
  }

  void accumulate(const ExpertJob& job) {
    ctx_.each_row(job.num_routes, op_.hidden, [&](uint32_t i) {  // an expert meets a row only once
      const uint32_t route = job.route + i;
      ctx_.kernels.accumulate(map_.weights[route], rows_.out[job.place + i], ctx_.f32(op_.y, map_.rows[route]),
                              op_.hidden);
    });
  }

  bool take(bool in_order) {
    return ctx_.experts->take(in_order, UINT32_MAX, ctx_.buffers.taken, ctx_.pass.should_stop);
  }

  // Workspace (headrace/ops.py, _experts_shape): gate, up, out, and the product quantized, each [capacity, ...].
  void bind_workspace(uint32_t num_places) {
    float* gate = ctx_.f32(op_.workspace);
    float* up = gate + size_t{op_.capacity} * op_.width;
    float* out = up + size_t{op_.capacity} * op_.width;
    q8_ = reinterpret_cast<uint8_t*>(out + size_t{op_.capacity} * op_.hidden);
    for (uint32_t i = 0; i < num_places; ++i) {
      rows_.gate[i] = gate + size_t{i} * op_.width;
      rows_.up[i] = up + size_t{i} * op_.width;
      rows_.out[i] = out + size_t{i} * op_.hidden;
      // A float down reads the product where swiglu left it.
      rows_.h[i] = quantizes_product() ? static_cast<const void*>(q8_row(i)) : rows_.gate[i];
    }
  }

  uint8_t* q8_row(uint32_t place) const { return q8_ + place * q8_row_bytes(op_.width); }

  bool quantizes_product() const { return is_quantized(source_.parts[2].type); }

  Matrix part(const uint8_t* slot, int i) const {
    const ExpertPart& p = source_.parts[i];
    return Matrix{p.type, p.rows, p.cols, slot + offsets_[i]};
  }

  // rows_.out of all jobs' routes. Two phases, because every output of down needs the whole product of gate and up.
  // An item is a pair of tiles of one expert: 32 columns of the product, which one thread carries up to its
  // quantized block.
  void compute() {
    const uint32_t pairs = (num_tiles(op_.width) + 1) / 2;
    each_expert_range(pairs, [&](const ExpertJob& job, uint32_t begin, uint32_t end, uint32_t thread) {
      gate_and_up(job, begin, end, thread);
    });
    each_expert_range(num_tiles(op_.hidden), [&](const ExpertJob& job, uint32_t begin, uint32_t end, uint32_t thread) {
      matmul(job, 2, rows_.h, rows_.out, begin, end, thread);
    });
  }

  // fn over [0, count) of every job, divided among the threads as one range over all jobs.
  template <class Fn>
  void each_expert_range(uint32_t count, Fn fn) {
    ctx_.pool.parallel_for(count * static_cast<uint32_t>(jobs_.size()), 1,
                           [&](uint32_t begin, uint32_t end, uint32_t thread) {
                             for (uint32_t at = begin; at < end;) {
                               const uint32_t job = at / count, job_end = std::min(end, (job + 1) * count);
                               fn(jobs_[job], at - job * count, job_end - job * count, thread);
                               at = job_end;
                             }
                           });
  }

  void gate_and_up(const ExpertJob& job, uint32_t pair_begin, uint32_t pair_end, uint32_t thread) {
    const uint32_t begin = 2 * pair_begin, end = std::min(2 * pair_end, num_tiles(op_.width));
    matmul(job, 0, rows_.x, rows_.gate, begin, end, thread);
    matmul(job, 1, rows_.x, rows_.up, begin, end, thread);
    const uint32_t col = begin * kTileRows, col_end = std::min(end * kTileRows, op_.width);
    for (uint32_t i = job.place; i < job.place + job.num_routes; ++i) {
      ctx_.kernels.swiglu(rows_.gate[i] + col, rows_.up[i] + col, rows_.gate[i] + col, col_end - col);
      if (quantizes_product())
        ctx_.kernels.quantize(rows_.gate[i], op_.width, col / kQuantBlock, col_end / kQuantBlock, q8_row(i));
    }
  }

  // MoESpec's two kernels. Deduplicating: all routes of the expert in one product, its weights read once. Per slot: a
  // product and a reading for each route; routes of one expert follow each other over a piece of its weights, so that
  // all but the first read it from the L2 cache.
  void matmul(const ExpertJob& job, int p, const std::vector<const void*>& x, const std::vector<float*>& y,
              uint32_t tile_begin, uint32_t tile_end, uint32_t thread) {
    const Matrix w = part(job.slot, p);
    if (!ctx_.pass.per_slot)
      return matmul_rows(ctx_, w, x.data() + job.place, job.num_routes, y.data() + job.place, tile_begin, tile_end,
                         thread);
    const uint32_t step = static_cast<uint32_t>(1 + kSlotPieceBytes / tile_bytes(w.type, w.cols));
    for (uint32_t tile = tile_begin; tile < tile_end; tile += step)
      for (uint32_t i = job.place; i < job.place + job.num_routes; ++i)
        matmul_rows(ctx_, w, x.data() + i, 1, y.data() + i, tile, std::min(tile + step, tile_end), thread);
  }

  const PassContext& ctx_;
  const ExpertsOp op_;
  const LayerExperts& source_;
  const uint32_t num_rows_;
  RouteMap& map_;
  RowPointers& rows_;
  std::vector<ExpertJob>& jobs_ = ctx_.buffers.jobs;
  std::array<uint64_t, 3> offsets_;
  uint8_t* q8_ = nullptr;
};

void check_layer(const Program& program, const OpInfo& info, const ExpertSource& source) {
  const ExpertsOp op(program, info);
  const std::string at = "experts of layer " + std::to_string(op.layer) + ": ";
  if (op.layer >= source.layers.size())
    throw Error(at + "the checkpoint has " + std::to_string(source.layers.size()) + " layers of experts");
  const LayerExperts& layer = source.layers[op.layer];
  if (layer.num_experts != op.num_experts)
    throw Error(at + "found " + std::to_string(layer.num_experts) + " experts, expected " +
                std::to_string(op.num_experts));
  const char* names[3] = {"gate", "up", "down"};
  for (int i = 0; i < 3; ++i) {
    const ExpertPart& part = layer.parts[i];
    const uint32_t rows = i < 2 ? op.width : op.hidden, cols = i < 2 ? op.hidden : op.width;
    if (part.rows != rows || part.cols != cols)
      throw Error(at + names[i] + " has shape [" + std::to_string(part.rows) + ", " + std::to_string(part.cols) +
                  "], expected [" + std::to_string(rows) + ", " + std::to_string(cols) + "]");
    if (is_quantized(part.type) && cols % kQuantBlock != 0)
      throw Error(at + names[i] + " is quantized, but its " + std::to_string(cols) + " columns are not whole blocks");
  }
  const bool takes_q8 = program.values[op.x].kind == ValueKind::kQ8;
  if (is_quantized(layer.parts[0].type) != takes_q8 || is_quantized(layer.parts[1].type) != takes_q8)
    throw Error(at + "gate and up must both be quantized or both be floats, as the program's input is");
}

}  // namespace

void check_experts(const Program& program, const ExpertMemory* experts) {
  for (const OpInfo& op : program.ops) {
    if (op.code != OpCode::kExperts) continue;
    if (experts == nullptr) throw Error("executor: the program has experts, but no expert memory was given");
    check_layer(program, op, experts->source());
  }
}

uint64_t expert_buffer_bytes(const Program& program, uint32_t max_rows) {
  uint64_t top_k = 0;
  for (const OpInfo& info : program.ops)
    if (info.code == OpCode::kExperts) top_k = std::max<uint64_t>(top_k, ExpertsOp(program, info).top_k);
  // A route's row, weight and place; a row's pointers, to it and to its outputs.
  return max_rows * (top_k * 3 * sizeof(uint32_t) + (1 + kMostLinears) * sizeof(void*));
}

void size_expert_buffers(const Program& program, OpBuffers& buffers) {
  size_t num_routes = 0, num_places = 0, num_experts = 0;
  for (const OpInfo& info : program.ops) {
    if (info.code != OpCode::kExperts) continue;
    const ExpertsOp op(program, info);
    const size_t routes = size_t{program.max_rows} * op.top_k;
    num_routes = std::max(num_routes, routes);
    num_places = std::max(num_places, std::min<size_t>(routes, op.capacity));
    num_experts = std::max<size_t>(num_experts, op.num_experts);
  }
  RouteMap& map = buffers.routes;
  map.experts.reserve(num_experts);
  map.num_routes.reserve(num_experts);
  map.first.reserve(num_experts + 1);
  map.next.reserve(num_experts);
  const auto grow = [](auto& v, size_t n) { v.resize(std::max(v.size(), n)); };
  grow(map.rows, num_routes);
  grow(map.weights, num_routes);
  grow(map.route_of, num_routes);
  RowPointers& rows = buffers.rows;
  grow(rows.x, std::max<size_t>(num_places, program.max_rows));
  grow(rows.y, kMostLinears * program.max_rows);
  grow(rows.h, num_places);
  for (std::vector<float*>* v : {&rows.gate, &rows.up, &rows.out}) grow(*v, num_places);
  buffers.jobs.reserve(num_experts);
  buffers.taken.reserve(num_experts);
}

void run_experts(const PassContext& ctx, const OpInfo& op) { ExpertsPass(ctx, op).run(); }

}  // namespace headrace
