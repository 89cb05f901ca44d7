// Ranks as threads for the tests of the comm and runtime rooms.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace dmuon {

/// Runs `body(rank)` on one thread a rank (each with one intra-op thread) and waits for all.  [ranks] what each threw,
/// without backtrace; "" where nothing was thrown.
[[nodiscard]] std::vector<std::string> errors_on_threads(int ranks, const std::function<void(int)>& body);

/// Likewise; throws std::runtime_error with all messages if any rank threw.
void on_threads(int ranks, const std::function<void(int)>& body);

}  // namespace dmuon
