#include "comm/thread_ranks.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <thread>

namespace dmuon {

std::vector<std::string> errors_on_threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto& error = errors[static_cast<size_t>(rank)];
      try {
        at::set_num_threads(1);
        body(rank);
      } catch (const c10::Error& thrown) {
        error = thrown.what_without_backtrace();
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

void on_threads(int ranks, const std::function<void(int)>& body) {
  std::string all;
  const auto errors = errors_on_threads(ranks, body);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank].empty()) all += "rank " + std::to_string(rank) + ": " + errors[rank] + "\n";
  }
  if (!all.empty()) throw std::runtime_error(all);
}

}  // namespace dmuon
