#ifndef EXPERTMESH_KERNELS_CPU_ACTIVATION_PLAIN_H_
#define EXPERTMESH_KERNELS_CPU_ACTIVATION_PLAIN_H_

#include "kernels/cpu/isa_table_plain.h"

namespace expertmesh {

// V is the including file's set of operations on 16 floats (V::Vec). Everything is elementwise: a
// value's result does not depend on its lane.

// Relative error below 4 * 2^-24 in the normal range (Cephes expf); overflow gives infinity, NaN
// stays NaN.
template <class V>
inline typename V::Vec Exp(typename V::Vec x) {
  // The second operand is returned for NaN. Beyond +-104 the result is 0 or infinity anyway.
  x = V::Min(V::Set(104.0f), V::Max(V::Set(-104.0f), x));
  const typename V::Vec n = V::RoundToInteger(V::Mul(x, V::Set(1.44269504088896341f)));
  typename V::Vec r = V::MulAdd(n, V::Set(-0.693359375f), x);
  r = V::MulAdd(n, V::Set(2.12194440e-4f), r);
  typename V::Vec p = V::Set(1.9875691500e-4f);
  p = V::MulAdd(p, r, V::Set(1.3981999507e-3f));
  p = V::MulAdd(p, r, V::Set(8.3334519073e-3f));
  p = V::MulAdd(p, r, V::Set(4.1665795894e-2f));
  p = V::MulAdd(p, r, V::Set(1.6666665459e-1f));
  p = V::MulAdd(p, r, V::Set(5.0000001201e-1f));
  p = V::MulAdd(p, V::Mul(r, r), V::Add(r, V::Set(1.0f)));
  return V::ScaleByPowerOfTwo(p, n);
}

// Absolute error below 4e-7: a minimax quotient of polynomials on [-4, 4], beyond which float32 erf
// is +-1.
template <class V>
inline typename V::Vec Erf(typename V::Vec x) {
  x = V::Min(V::Set(4.0f), V::Max(V::Set(-4.0f), x));
  const typename V::Vec x2 = V::Mul(x, x);
  typename V::Vec p = V::Set(-2.72614225801306e-10f);
  p = V::MulAdd(p, x2, V::Set(2.77068142495902e-08f));
  p = V::MulAdd(p, x2, V::Set(-2.10102402082508e-06f));
  p = V::MulAdd(p, x2, V::Set(-5.69250639462346e-05f));
  p = V::MulAdd(p, x2, V::Set(-7.34990630326855e-04f));
  p = V::MulAdd(p, x2, V::Set(-2.95459980854025e-03f));
  p = V::MulAdd(p, x2, V::Set(-1.60960333262415e-02f));
  typename V::Vec q = V::Set(-1.45660718464996e-05f);
  q = V::MulAdd(q, x2, V::Set(-2.13374055278905e-04f));
  q = V::MulAdd(q, x2, V::Set(-1.68282697438203e-03f));
  q = V::MulAdd(q, x2, V::Set(-7.37332916720468e-03f));
  q = V::MulAdd(q, x2, V::Set(-1.42647390514189e-02f));
  return V::Div(V::Mul(x, p), q);
}

// x * sigmoid(alpha * x)
template <class V>
inline typename V::Vec Swish(typename V::Vec x, typename V::Vec alpha_x) {
  const typename V::Vec e = Exp<V>(V::Sub(V::Set(0.0f), alpha_x));
  return V::Div(x, V::Add(V::Set(1.0f), e));
}

template <class V>
inline typename V::Vec Activate(typename V::Vec gate, typename V::Vec up, const GateUpArgs& args) {
  switch (args.activation) {
    case kActivationGeluMul: {
      const typename V::Vec e = Erf<V>(V::Mul(gate, V::Set(0.70710678118654752f)));
      return V::Mul(V::Mul(V::Mul(V::Set(0.5f), gate), V::Add(V::Set(1.0f), e)), up);
    }
    case kActivationClampedSwiGlu: {
      const typename V::Vec limit = V::Set(args.limit);
      gate = V::Min(limit, gate);
      up = V::Min(limit, V::Max(V::Set(-args.limit), up));
      return V::Mul(Swish<V>(gate, V::Mul(V::Set(args.alpha), gate)), V::Add(up, V::Set(1.0f)));
    }
    case kActivationSiluMul:
      break;
  }
  return V::Mul(Swish<V>(gate, gate), up);
}

}  // namespace expertmesh

#endif  // EXPERTMESH_KERNELS_CPU_ACTIVATION_PLAIN_H_
