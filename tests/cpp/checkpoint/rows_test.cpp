#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "comm/thread_ranks.h"
#include "dmuon/checkpoint.h"
#include "dmuon/recording_communicator.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

using ::testing::HasSubstr;

struct Mesh {
  int shard = 1;
  int replicate = 1;
};

// Communicators of every rank of a mesh; rank = replicate * shard size + shard.
class Ranks {
 public:
  explicit Ranks(Mesh mesh) : mesh_(mesh) {
    for (int i = 0; i < mesh.replicate; ++i) rows_.push_back(make_thread_world(mesh.shard, kTimeout));
    for (int i = 0; i < mesh.shard; ++i) columns_.push_back(make_thread_world(mesh.replicate, kTimeout));
  }

  [[nodiscard]] int count() const { return mesh_.shard * mesh_.replicate; }
  [[nodiscard]] CheckpointAxes axes(int rank) const {
    const auto shard = rank % mesh_.shard;
    const auto replica = rank / mesh_.shard;
    CheckpointAxes axes{make_thread_communicator(rows_[static_cast<size_t>(replica)], shard), nullptr};
    if (mesh_.replicate > 1) axes.replicate = make_thread_communicator(columns_[static_cast<size_t>(shard)], replica);
    return axes;
  }

 private:
  static constexpr std::chrono::milliseconds kTimeout{10'000};
  Mesh mesh_;
  std::vector<std::shared_ptr<ThreadWorld>> rows_;
  std::vector<std::shared_ptr<ThreadWorld>> columns_;
};

MatrixPlace place_of(std::int64_t rows, std::int64_t cols, plan::Slot owner) {
  return {"matrix", rows, cols, owner, at::TensorOptions().dtype(at::kFloat)};
}

TEST(RowRange, FollowsChunk) {
  for (std::int64_t rows = 1; rows <= 12; ++rows) {
    for (int parts = 1; parts <= 6; ++parts) {
      const auto chunks = at::arange(rows).chunk(parts);
      for (int part = 0; part < parts; ++part) {
        const auto range = plan::row_range(rows, parts, part);
        const bool some = static_cast<size_t>(part) < chunks.size();
        EXPECT_EQ(range.count(), some ? chunks[static_cast<size_t>(part)].numel() : 0) << rows << " over " << parts;
        if (some) {
          EXPECT_EQ(range.begin, chunks[static_cast<size_t>(part)][0].item<std::int64_t>());
        }
      }
    }
  }
  EXPECT_THROW(static_cast<void>(plan::row_range(4, 2, 2)), std::invalid_argument);
}

class RowsOnMeshes : public ::testing::TestWithParam<Mesh> {};

// Random shapes, every owner; seeds name the case.
TEST_P(RowsOnMeshes, EveryRankHasItsRowsAndTheOwnerGetsThemBack) {
  const Ranks ranks(GetParam());
  on_threads(ranks.count(), [&](int rank) {
    const auto axes = ranks.axes(rank);
    const auto here = axes.here();
    std::mt19937 random(7);
    for (int seed = 0; seed < 20; ++seed) {
      const auto rows = 1 + static_cast<std::int64_t>(random() % 9);
      const auto cols = 1 + static_cast<std::int64_t>(random() % 5);
      const plan::Slot owner{.shard = static_cast<int>(random() % static_cast<unsigned>(GetParam().shard)),
                             .replicate = static_cast<int>(random() % static_cast<unsigned>(GetParam().replicate))};
      const auto place = place_of(rows, cols, owner);
      const auto matrix = at::arange(rows * cols, at::kFloat).view({rows, cols}).add(100 * seed);
      const auto mine = scatter_rows(axes, place, here == owner ? matrix : at::Tensor());
      const auto range = plan::row_range(rows, GetParam().shard, here.shard);
      EXPECT_TRUE(mine.equal(matrix.narrow(0, range.begin, range.count()))) << "seed " << seed << ", rank " << rank;
      EXPECT_EQ(mine.storage().nbytes(), mine.nbytes()) << "rows must not keep a padded buffer alive";
      const auto back = here == owner ? at::zeros_like(matrix) : at::Tensor();
      gather_rows(axes, place, mine.add(0.5).to(at::kDouble), back);
      if (here == owner) {
        EXPECT_TRUE(back.equal(matrix.add(0.5))) << "seed " << seed;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, RowsOnMeshes,
                         ::testing::Values(Mesh{1, 1}, Mesh{2, 1}, Mesh{3, 1}, Mesh{4, 1}, Mesh{1, 3}, Mesh{2, 2},
                                           Mesh{3, 2}));

TEST(Rows, RowsAreAnOwnCopy) {
  const Ranks ranks({.shard = 1, .replicate = 1});
  const auto matrix = at::ones({2, 3});
  const auto rows = scatter_rows(ranks.axes(0), place_of(2, 3, {}), matrix);
  matrix.zero_();
  EXPECT_TRUE(rows.eq(1).all().item<bool>());
}

TEST(Rows, AnOwnerWithoutTheMatrixIsRefusedByName) {
  const Ranks ranks({.shard = 1, .replicate = 1});
  const auto axes = ranks.axes(0);
  const auto place = place_of(2, 3, {});
  for (const auto& wrong : {at::Tensor(), at::zeros({3, 2}), at::zeros({2, 3}, at::kDouble),
                            at::empty({2, 3}, at::TensorOptions().device(at::kMeta))}) {
    try {
      static_cast<void>(scatter_rows(axes, place, wrong));
      FAIL() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("matrix 'matrix': its owner must hold 2 x 3"));
    }
  }
  try {
    gather_rows(axes, place, at::zeros({1, 3}), at::zeros({2, 3}));
    FAIL() << "accepted";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected rows of shape [2, 3] on shard rank 0, found [1, 3]"));
  }
}

// Every byte of the matrix crosses once per replica row or column: nobody gets more than its part.
TEST(Rows, NobodyReceivesMoreThanItsPart) {
  const Ranks ranks({.shard = 4, .replicate = 1});
  on_threads(4, [&](int rank) {
    auto axes = ranks.axes(rank);
    const auto recorder = std::make_shared<RecordingCommunicator>(axes.shard);
    axes.shard = recorder;
    const auto matrix = at::ones({8, 5});
    static_cast<void>(scatter_rows(axes, place_of(8, 5, {.shard = 1}), rank == 1 ? matrix : at::Tensor()));
    EXPECT_EQ(recorder->stats().broadcast_bytes, rank == 1 ? 0 : 2 * 5 * 4);
  });
}

}  // namespace
}  // namespace dmuon
