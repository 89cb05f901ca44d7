#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include "dmuon/newton_schulz.h"

namespace dmuon {
namespace {

constexpr std::array kPolarExpress = {
    NsCoefficients{8.28721201814563, -23.595886519098837, 17.300387312530933},
    NsCoefficients{4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    NsCoefficients{3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    NsCoefficients{3.3184196573706015, -2.488488024314874, 0.51004894012372},
    NsCoefficients{2.300652019954817, -1.6689039845747493, 0.4188073119525673},
    NsCoefficients{1.891301407787398, -1.2679958271945868, 0.37680408948524835},
    NsCoefficients{1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
};

constexpr std::array kYou = {
    NsCoefficients{4.0848, -6.8946, 2.9270}, NsCoefficients{3.9505, -6.3029, 2.6377},
    NsCoefficients{3.7418, -5.5913, 2.3037}, NsCoefficients{2.8769, -3.1427, 1.2046},
    NsCoefficients{2.8366, -3.0525, 1.2012},
};

constexpr std::array kKellerJordan = {NsCoefficients{3.4445, -4.7750, 2.0315}};

constexpr NsCoefficients kLimit{15.0 / 8.0, -10.0 / 8.0, 3.0 / 8.0};

std::vector<NsCoefficients> resized(std::span<const NsCoefficients> table, NsCoefficients tail, int steps) {
  std::vector<NsCoefficients> result(table.begin(), table.begin() + std::min<std::ptrdiff_t>(steps, std::ssize(table)));
  result.resize(static_cast<std::size_t>(steps), tail);
  return result;
}

// p(x / margin): a step that is safe up to `margin` times its interval.
NsCoefficients widened(const NsCoefficients& step, double margin) {
  return {step.a / margin, step.b / std::pow(margin, 3), step.c / std::pow(margin, 5)};
}

std::vector<NsCoefficients> polar_express(int steps) {
  std::vector<NsCoefficients> result = resized(kPolarExpress, kLimit, steps);
  for (NsCoefficients& step : result) {
    if (step != kLimit) step = widened(step, kPolarExpressMargin);
  }
  return result;
}

}  // namespace

std::vector<NsCoefficients> coefficient_set(const std::string& name, int steps) {
  TORCH_CHECK_VALUE(steps >= 1, "[dmuon.newton_schulz] steps is ", steps,
                    "; expected at least 1. The usual value is 5.");
  if (name == "polar_express") return polar_express(steps);
  if (name == "you") return resized(kYou, kYou.back(), steps);
  if (name == "keller_jordan") return resized(kKellerJordan, kKellerJordan.back(), steps);
  TORCH_CHECK_VALUE(false, "[dmuon.newton_schulz] unknown coefficient set '", name,
                    "'; expected 'polar_express', 'you' or 'keller_jordan'. For coefficients of your own, fill "
                    "NsOptions::coefficients (solve_coefficients computes optimal ones).");
}

NsOptions make_ns_options(const std::string& backend, int steps, const std::string& coefficients) {
  NsOptions options{.coefficients = coefficient_set(coefficients, steps)};
  if (backend == "gram") return options;
  if (backend == "gram_accurate") {
    options.restarts = {2, 4};
    return options;
  }
  TORCH_CHECK_VALUE(backend == "standard", "[dmuon.newton_schulz] unknown backend '", backend,
                    "'; expected 'gram', 'gram_accurate' or 'standard'. Pass one of these.");
  options.backend = NsBackend::kStandard;
  return options;
}

}  // namespace dmuon
