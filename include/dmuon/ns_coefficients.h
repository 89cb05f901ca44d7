// The polynomials of Newton-Schulz.  Plain C++: no torch.
#pragma once

namespace dmuon {

/// One step's polynomial p(x) = a x + b x^3 + c x^5.
struct NsCoefficients {
  double a = 0.0;
  double b = 0.0;
  double c = 0.0;

  bool operator==(const NsCoefficients&) const = default;
};

}  // namespace dmuon
