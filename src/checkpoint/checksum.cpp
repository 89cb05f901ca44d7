#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <thread>

#include "dmuon/checkpoint.h"

namespace dmuon {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 22;  // bytes a thread reads at a time
constexpr unsigned kThreads = 8;                        // torchrun sets OpenMP's to one
constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15ULL;

std::uint64_t mix(std::uint64_t value) {
  value ^= value >> 32;
  value *= kOdd;
  return value ^ (value >> 29);
}

// Four independent lanes, so that multiplications overlap.  Every step is a bijection of its lane, so that a change of
// any one word changes the result.
std::uint64_t block_checksum(const std::vector<std::uint64_t>& words) {
  std::uint64_t lanes[4] = {1, 2, 3, 4};
  for (size_t i = 0; i < words.size(); i += 4) {
    for (size_t lane = 0; lane < 4; ++lane)
      lanes[lane] = ((lanes[lane] ^ words[i + lane]) * kOdd) ^ (lanes[lane] >> 31);
  }
  return mix(mix(mix(mix(lanes[0]) ^ lanes[1]) ^ lanes[2]) ^ lanes[3]);
}

// The bytes [begin, begin + count), zeros after them.
std::uint64_t read_block(int file, std::int64_t begin, std::int64_t count, const std::string& path) {
  std::vector<std::uint64_t> words(static_cast<size_t>((count + 31) / 32 * 4));
  auto* bytes = reinterpret_cast<char*>(words.data());
  for (std::int64_t done = 0; done < count;) {
    const auto got = ::pread(file, bytes + done, static_cast<size_t>(count - done), begin + done);
    TORCH_CHECK(got > 0, "[dmuon.checkpoint] cannot read ", path, ": ",
                got == 0 ? "it became shorter" : std::strerror(errno));
    done += got;
  }
  return block_checksum(words);
}

}  // namespace

std::uint64_t file_checksum(const std::string& path) {
  const auto size = static_cast<std::int64_t>(std::filesystem::file_size(path));
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "[dmuon.checkpoint] cannot open ", path, ": ", std::strerror(errno));
  const std::shared_ptr<const int> closer(&file, [](const int* opened) { ::close(*opened); });
  const auto blocks = (size + kBlock - 1) / kBlock;
  std::vector<std::uint64_t> sums(static_cast<size_t>(blocks));
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (auto i = next++; i < blocks; i = next++) {
      sums[static_cast<size_t>(i)] = read_block(file, i * kBlock, std::min(kBlock, size - i * kBlock), path);
    }
  };
  const auto threads = std::min<std::int64_t>(std::min(kThreads, std::thread::hardware_concurrency()), blocks);
  std::vector<std::future<void>> others;
  for (std::int64_t i = 1; i < threads; ++i) others.push_back(std::async(std::launch::async, work));
  work();
  for (auto& other : others) other.get();
  auto total = static_cast<std::uint64_t>(size);
  for (const auto sum : sums) total = mix(total ^ sum);
  return total;
}

}  // namespace dmuon
