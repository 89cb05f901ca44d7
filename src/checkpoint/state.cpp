#include <ATen/ATen.h>

#include <map>

#include "dmuon/checkpoint.h"

namespace dmuon {
namespace {

constexpr size_t kNamesShown = 10;
constexpr const char* kTakesWholeTensors =
    "For a state of whole tensors use torch.distributed.checkpoint.state_dict's set_model_state_dict or "
    "set_optimizer_state_dict with StateDictOptions(full_state_dict=True). ";

std::string list_of(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = c10::str(what, ": ");
  for (size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) text += c10::str(i == 0 ? "" : ", ", names[i]);
  if (names.size() > kNamesShown) text += c10::str(" and ", names.size() - kNamesShown, " more");
  return text + ". ";
}

std::string first_line_that_differs(const std::string& mine, const std::string& other) {
  size_t begin = 0;
  for (size_t i = 0; i < std::min(mine.size(), other.size()) && mine[i] == other[i]; ++i) {
    if (mine[i] == '\n') begin = i + 1;
  }
  const auto line = [begin](const std::string& text) {
    return begin < text.size() ? text.substr(begin, text.find('\n', begin) - begin) : std::string("nothing");
  };
  return c10::str("'", line(mine), "' and '", line(other), "'");
}

std::string difference(const std::vector<std::string>& descriptions) {
  for (size_t rank = 1; rank < descriptions.size(); ++rank) {
    if (descriptions[rank] == descriptions[0]) continue;
    return c10::str("ranks 0 and ", rank,
                    " were given different states: ", first_line_that_differs(descriptions[0], descriptions[rank]),
                    ". Every rank must be given the same keys");
  }
  return "";
}

}  // namespace

std::string state_problem(const std::vector<StateEntry>& expected, const std::vector<StateEntry>& given, bool strict) {
  std::map<std::string, const StateEntry*> left;
  for (const auto& entry : given) left[entry.key] = &entry;
  std::vector<std::string> missing;
  std::vector<std::string> shapes;
  std::vector<std::string> shardings;
  for (const auto& entry : expected) {
    const auto found = left.extract(entry.key);
    if (found.empty()) {
      missing.push_back(c10::str("'", entry.key, "'"));
    } else if (found.mapped()->sizes != entry.sizes) {
      shapes.push_back(c10::str("'", entry.key, "' is ", at::IntArrayRef(found.mapped()->sizes), ", expected ",
                                at::IntArrayRef(entry.sizes)));
    } else if (!entry.sharding.empty() && found.mapped()->sharding != entry.sharding) {
      shardings.push_back(c10::str("'", entry.key, "' is ", found.mapped()->sharding, ", expected ", entry.sharding));
    }
  }
  std::vector<std::string> unexpected;
  for (const auto& [key, entry] : left) unexpected.push_back(c10::str("'", key, "'"));
  auto problem = list_of("wrong shapes", shapes) + list_of("other shardings", shardings);
  if (!shardings.empty()) problem += kTakesWholeTensors;
  if (strict) problem += list_of("missing keys", missing) + list_of("unexpected keys", unexpected);
  return problem;
}

std::string describe_state(const std::vector<StateEntry>& entries) {
  std::vector<std::string> lines;
  for (const auto& entry : entries) {
    lines.push_back(c10::str(entry.key, " ", at::IntArrayRef(entry.sizes), " ", entry.sharding, "\n"));
  }
  std::sort(lines.begin(), lines.end());
  std::string text;
  for (const auto& line : lines) text += line;
  return text;
}

// Nobody throws before every rank has taken part in every exchange: the others would wait for it.
void agree_on_state(const CheckpointAxes& axes, const std::string& caller, const std::string& problem,
                    const std::string& description) {
  std::string found = problem;
  for (auto* axis : axes.all()) {
    const auto problems = axis->exchange(found);
    const auto descriptions = axis->exchange(description);
    for (size_t rank = 0; rank < problems.size() && found.empty(); ++rank) {
      if (!problems[rank].empty()) found = c10::str("on another rank: ", problems[rank]);
    }
    if (found.empty()) found = difference(descriptions);
  }
  TORCH_CHECK(found.empty(), "[dmuon.", caller, "] nothing was changed: ", found);
}

std::string groups_problem(const std::vector<OptimizerGroup>& expected, const std::vector<OptimizerGroup>& given) {
  for (const auto& group : given) {
    if (auto problem = version_problem(group.version); !problem.empty()) return problem;
  }
  const auto matches = [](const auto& a, const auto& b) { return a.muon == b.muon && a.params == b.params; };
  if (std::equal(expected.begin(), expected.end(), given.begin(), given.end(), matches)) return "";
  const auto describe = [](const std::vector<OptimizerGroup>& groups) {
    std::string text;
    for (const auto& group : groups) text += c10::str(" ", group.muon ? "Muon" : "AdamW", " of ", group.params);
    return text.empty() ? " none" : text;
  };
  return c10::str("the optimizer has groups (kind of number of parameters)", describe(expected), "; the state has",
                  describe(given), ". For a state of another optimizer use dmuon.import_state");
}

std::string version_problem(std::int64_t version) {
  if (version >= 1 && version <= kCheckpointVersion) return "";
  return c10::str("the checkpoint has format version ", version, ", and this dmuon reads versions 1 to ",
                  kCheckpointVersion, ". Load it with the dmuon that wrote it, or a newer one");
}

}  // namespace dmuon
