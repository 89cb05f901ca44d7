#include <algorithm>
#include <charconv>
#include <cstddef>
#include <string_view>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

/// Takes the text up to the next space off `line`.
std::string_view take_word(std::string_view& line) {
  const std::size_t end = std::min(line.find(' '), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return word;
}

bool is_number(std::string_view word) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  return error == std::errc() && end == word.data() + word.size();
}

/// A line as `'name' [rows, cols]`, and its other fields if they are needed; a line of another form as it is.
std::string readable(std::string_view line, bool all_fields) {
  std::string_view rest = line;
  const std::string_view name = take_word(rest);
  const std::string_view rows = take_word(rest);
  const std::string_view cols = take_word(rest);
  std::string text = "'";
  if (!is_number(rows) || !is_number(cols)) return text.append(line).append("'");
  text.append(name).append("' [").append(rows).append(", ").append(cols).append("]");
  if (all_fields) text.append(" (").append(rest).append(")");
  return text;
}

std::string describe_difference(std::size_t rank, std::size_t parameter, const std::string& reference,
                                const std::string& other) {
  const std::string who = "rank " + std::to_string(rank);
  return who + " differs from rank 0 at parameter " + std::to_string(parameter) + ": rank 0 has " + reference + ", " +
         who + " has " + other;
}

std::string nothing_there(std::size_t count) {
  return count == 0 ? "no parameters" : "only " + std::to_string(count) + " parameters";
}

std::string compare(const std::vector<std::string_view>& reference, const std::vector<std::string_view>& other,
                    std::size_t rank) {
  const auto [a, b] = std::mismatch(reference.begin(), reference.end(), other.begin(), other.end());
  const auto at = static_cast<std::size_t>(a - reference.begin());
  if (a == reference.end() && b == other.end()) return "";
  if (a == reference.end()) return describe_difference(rank, at, nothing_there(at), readable(*b, false));
  if (b == other.end()) return describe_difference(rank, at, readable(*a, false), nothing_there(at));
  const bool all_fields = readable(*a, false) == readable(*b, false);
  return describe_difference(rank, at, readable(*a, all_fields), readable(*b, all_fields));
}

}  // namespace

std::string describe_inputs(const std::vector<Matrix>& matrices) {
  std::string text;
  for (const Matrix& matrix : matrices) {
    text += matrix.name + " " + std::to_string(matrix.rows) + " " + std::to_string(matrix.cols) + " " + matrix.layer;
    if (matrix.kind == Kind::kElementwise) text += " elementwise";
    text += '\n';
  }
  return text;
}

std::string first_difference(const std::vector<std::string>& descriptions) {
  if (descriptions.empty()) return "";
  const std::vector<std::string_view> reference = split_lines(descriptions[0]);
  for (std::size_t rank = 1; rank < descriptions.size(); ++rank) {
    if (descriptions[rank] == descriptions[0]) continue;
    std::string message = compare(reference, split_lines(descriptions[rank]), rank);
    if (!message.empty()) return message;
  }
  return "";
}

}  // namespace dmuon::plan
