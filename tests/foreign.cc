// Foreign functions for test_foreign.py: rows times a vector, with the sum of all rows; and the largest of every column.

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;

// y[..., r, d] = x[..., r, d] * w[..., d], total[d] = the sum of x over all but d. `rows` is how many rows the caller says there are.
static ffi::Error Scale(int32_t rows, F32 x, F32 w, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> total) {
  const int64_t d = x.dimensions().back(), n = x.element_count() / d, shared = n * d / w.element_count();
  if (rows != n) return ffi::Error::InvalidArgument("there are other rows than the attribute says");
  std::fill_n(total->typed_data(), d, 0.f);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < d; ++j) {
      y->typed_data()[i * d + j] = x.typed_data()[i * d + j] * w.typed_data()[i / shared * d + j];
      total->typed_data()[j] += x.typed_data()[i * d + j];
    }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(scale, Scale,
                              ffi::Ffi::Bind().Attr<int32_t>("rows").Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>());

// most[d] = the largest x[r, d].
static ffi::Error Most(F32 x, ffi::ResultBuffer<ffi::F32> most) {
  const int64_t d = x.dimensions().back(), n = x.element_count() / d;
  for (int64_t j = 0; j < d; ++j) {
    most->typed_data()[j] = x.typed_data()[j];
    for (int64_t i = 1; i < n; ++i) most->typed_data()[j] = std::max(most->typed_data()[j], x.typed_data()[i * d + j]);
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(most, Most, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());
