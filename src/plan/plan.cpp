#include "dmuon/plan.h"

#include <algorithm>
#include <string_view>

namespace dmuon::plan {
namespace {

/// FNV-1a, 64 bits; numbers go in as 8 bytes, least significant first, so the value is the same on every machine.
class Fnv1a {
 public:
  void add(std::string_view text) {
    add(static_cast<std::int64_t>(text.size()));
    for (const char c : text) add_byte(static_cast<unsigned char>(c));
  }

  void add(std::int64_t number) {
    const auto bits = static_cast<std::uint64_t>(number);
    for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<unsigned char>(bits >> shift));
  }

  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  void add_byte(unsigned char byte) {
    value_ ^= byte;
    value_ *= 0x100000001b3ULL;
  }

  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace

double Plan::imbalance() const {
  double total = 0.0;
  double largest = 0.0;
  for (const SlotLoad& load : loads) {
    total += load.cost_seconds;
    largest = std::max(largest, load.cost_seconds);
  }
  if (total <= 0.0) return 1.0;
  return std::max(1.0, largest * static_cast<double>(loads.size()) / total);
}

std::uint64_t Plan::fingerprint() const {
  Fnv1a hash;
  hash.add(mesh.shard);
  hash.add(mesh.replicate);
  hash.add(static_cast<std::int64_t>(matrices.size()));
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    hash.add(matrices[i].name);
    hash.add(matrices[i].rows);
    hash.add(matrices[i].cols);
    hash.add(matrices[i].layer);
    if (matrices[i].kind == Kind::kElementwise) hash.add("elementwise");
    hash.add(owners[i].shard);
    hash.add(owners[i].replicate);
  }
  return hash.value();
}

}  // namespace dmuon::plan
