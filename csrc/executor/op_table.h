// Printed by `python -m headrace.ops` from headrace/ops.py. Do not edit.
// clang-format off
#pragma once

#include <cstdint>

namespace headrace {

enum class ValueKind : uint32_t { kF32 = 0, kI32 = 1, kQ8 = 2, kBytes = 3 };
enum class Extent : uint32_t { kRows = 0, kOutRows = 1, kNone = 2, kLogitRows = 3 };
enum class StateKind : uint32_t { kKv = 0 };

enum class OpCode : uint32_t {
  kEmbed = 0,
  kRmsNorm = 1,
  kQuantize = 2,
  kLinear = 3,
  kRopeAngles = 4,
  kRope = 5,
  kAttention = 6,
  kAdd = 7,
  kRoute = 8,
  kExperts = 9,
  kSelectRows = 10,
  kOutput = 11,
};

// Indices of each op's attributes in the program's attribute list.
namespace attr_rms_norm { enum : uint32_t { kGroup, kEps }; }
namespace attr_rope { enum : uint32_t { kHeadDim, kStyle }; }
namespace attr_attention { enum : uint32_t { kNumAttentionHeads, kNumKeyValueHeads, kHeadDim, kWindow, kScale }; }
namespace attr_route { enum : uint32_t { kLayer, kTopK, kScoring, kNormalize, kScaling }; }
namespace attr_experts { enum : uint32_t { kLayer, kNumExperts, kMoeIntermediateSize, kRouteCapacity }; }

struct OpSpec {
  const char* name;
  uint32_t num_inputs, num_weights, num_states, num_outputs, num_attrs;
  const char* attr_types;  // one of "i" (int64) and "d" (double) per attribute
};

constexpr uint32_t kNumOps = 12;
constexpr OpSpec kOps[kNumOps] = {
    {"embed", 0, 1, 0, 1, 0, ""},
    {"rms_norm", 1, 1, 0, 1, 2, "id"},
    {"quantize", 1, 0, 0, 1, 0, ""},
    {"linear", 1, 1, 0, 1, 0, ""},
    {"rope_angles", 0, 1, 0, 1, 0, ""},
    {"rope", 2, 0, 0, 1, 2, "ii"},
    {"attention", 3, 0, 1, 1, 5, "iiiid"},
    {"add", 2, 0, 0, 1, 0, ""},
    {"route", 1, 0, 0, 2, 5, "iiiid"},
    {"experts", 3, 0, 0, 2, 4, "iiii"},
    {"select_rows", 1, 0, 0, 1, 0, ""},
    {"output", 1, 1, 0, 2, 0, ""},
};

}  // namespace headrace
