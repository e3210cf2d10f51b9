// An imitated CUDA card for a torch without CUDA: tensors of device "cuda" live in host memory, every operator runs
// its CPU kernel on the same bytes, and what a card refuses (tensors of two devices in one operator) is refused.
// What it cannot show stands in loader.py.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace {
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;

thread_local int8_t current = 0;
std::atomic<int64_t> held{0}, peak{0};

// a fork has cards of its own, by its own environment
int64_t told(const char* name, int64_t otherwise) {
  const char* given = std::getenv(name);
  return given ? std::atoll(given) : otherwise;
}
int cards() { return told("FAKE_CUDA_CARDS", 1); }

// ---- the device: cards of one node, and streams on which nothing is ever late

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    uncheckedSetDevice(d);
    return old;
  }
  c10::Stream getStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(DeviceType::CUDA, d.index() < 0 ? current : d.index()));
  }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return cards(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int one;
    *event = &one;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- memory: counted in blocks of 512 bytes, as torch's caching allocator does

void count(int64_t bytes) {
  int64_t now = (held += bytes), seen = peak.load();
  while (now > seen && !peak.compare_exchange_weak(seen, now)) {}
}

int64_t blocks(size_t bytes) { return (static_cast<int64_t>(bytes) + 511) / 512 * 512; }

void take(int64_t bytes) {
  const int64_t capacity = told("FAKE_CUDA_BYTES", int64_t(24) << 30);
  TORCH_CHECK_WITH(OutOfMemoryError, held + bytes <= capacity,
                   "CUDA out of memory. Tried to allocate ", bytes, " bytes. The imitated card has ", capacity);
  count(bytes);
}

struct Block {
  void* place;
  int64_t bytes;
};
void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::free(block->place);
  count(-block->bytes);
  delete block;
}

struct CardMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Device here(DeviceType::CUDA, current);
    if (!n) return {nullptr, nullptr, &c10::detail::deleteNothing, here};
    int64_t bytes = blocks(n);
    take(bytes);
    void* place = nullptr;
    TORCH_CHECK(!posix_memalign(&place, 512, bytes), "the machine itself has no memory left for the imitated card");
    return {place, new Block{place, bytes}, &free_block, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
CardMemory memory;
const bool registered = (c10::SetAllocator(DeviceType::CUDA, &memory, 100), true);

// ---- the same bytes as a tensor of the CPU, and the way back

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, DispatchKey key) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

// with the keys of what it is a view of, as autograd wants it
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                      like.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return out;
}

at::Tensor as_cpu(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto* kept = new c10::Storage(t.storage());
  c10::DataPtr place(const_cast<void*>(kept->data()), kept, &drop_storage, Device(DeviceType::CPU));
  c10::Storage same(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept->nbytes(), std::move(place), c10::GetAllocator(DeviceType::CPU), true));
  auto out = with_storage(t, std::move(same), DispatchKey::CPU);
  if (t.is_conj()) out = out.conj();
  if (t.is_neg()) out = out._neg_view();
  return out;
}

// what a CPU kernel made becomes the card's: its bytes count as long as they live
struct Made {
  c10::Storage storage;
  int64_t bytes;
};
void drop_made(void* context) {
  auto* made = static_cast<Made*>(context);
  count(-made->bytes);
  delete made;
}

at::Tensor as_cuda(const at::Tensor& t, int8_t index) {
  int64_t bytes = blocks(t.storage().nbytes());
  take(bytes);
  c10::DataPtr place(const_cast<void*>(t.storage().data()), new Made{t.storage(), bytes}, &drop_made,
                     Device(DeviceType::CUDA, index));
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(), std::move(place), &memory, true));
  auto out = with_storage(t, std::move(storage), DispatchKey::CUDA);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

// ---- every operator without a kernel of its own here

// those for which a card takes tensors of the CPU beside its own
const std::set<std::string> MIXES = {"aten::copy_",  "aten::_copy_from",           "aten::index",     "aten::index_put_",
                                     "aten::set_",   "aten::_index_put_impl_",     "aten::index_put"};

// visits every tensor of an argument or a result; `listed` where it is one of a list
template <typename Visit>
void each_tensor(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor(), false);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorList()) list.push_back(visit(t, true));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      list.push_back(t ? std::optional<at::Tensor>(visit(*t, false)) : t);
    value = list;
  }
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t taken = schema.arguments().size(), given = schema.returns().size();
  struct Pair {
    at::Tensor cuda, cpu;
  };
  std::vector<Pair> pairs;
  int8_t index = -1;
  bool of_cpu = false;
  for (size_t i = stack->size() - taken; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    each_tensor(value, [&](const at::Tensor& t, bool listed) -> at::Tensor {
      if (!t.defined()) return t;
      if (!t.is_cuda()) {
        of_cpu |= t.is_cpu() && (listed || t.dim() > 0);  // a single number of the CPU is taken, but not in a list
        return t;
      }
      TORCH_CHECK(index < 0 || index == t.get_device(), name, ": Expected all tensors to be on the same device, but found "
                  "at least two devices, cuda:", int(index), " and cuda:", int(t.get_device()), "!");
      index = t.get_device();
      pairs.push_back({t, as_cpu(t)});
      return pairs.back().cpu;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (index < 0) index = value.toDevice().has_index() ? value.toDevice().index() : current;
      value = Device(DeviceType::CPU);
    }
  }
  TORCH_CHECK(pairs.empty() || !of_cpu || MIXES.count(name), name,
              ": Expected all tensors to be on the same device, but found at least two devices, cuda:", int(index), " and cpu!");
  if (index < 0) index = current;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& pair : pairs) {  // what the operator resized, or laid elsewhere
    if (pair.cpu.is_conj() || pair.cpu.is_neg()) continue;
    auto* to = pair.cuda.unsafeGetTensorImpl();
    const bool moved = pair.cpu.storage().data() != pair.cuda.storage().data();
    if (moved) to->set_storage_keep_dtype(as_cuda(pair.cpu, index).storage());
    if (moved || pair.cpu.sizes() != pair.cuda.sizes() || pair.cpu.strides() != pair.cuda.strides())
      to->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides(), pair.cpu.storage_offset());
  }
  for (size_t i = stack->size() - given; i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const at::Tensor& t, bool) -> at::Tensor {
      if (!t.defined() || !t.is_cpu()) return t;
      for (auto& pair : pairs)
        if (t.is_same(pair.cpu)) return pair.cuda;
      for (auto& pair : pairs)  // a view
        if (t.has_storage() && t.storage().data() && t.storage().data() == pair.cpu.storage().data())
          return view_of(pair.cuda, t);
      return as_cuda(t, index);
    });
}

// ---- operators that make tensors, or only look at them otherwise

at::Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(device.value_or(Device(DeviceType::CUDA, current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device.value_or(Device(DeviceType::CUDA, current)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  as_cpu(self).copy_(as_cpu(from));
  return self;
}
at::Scalar item(const at::Tensor& t) { return as_cpu(t).item(); }
at::Tensor view(const at::Tensor& t, at::SymIntArrayRef size) {
  return view_of(t, as_cpu(t).view_symint(size));
}
at::Tensor as_strided(const at::Tensor& t, at::SymIntArrayRef size, at::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                   offset ? offset->expect_int() : t.storage_offset());
  return out;
}
at::Tensor reshape_alias(const at::Tensor& t, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return as_strided(t, size, stride, c10::SymInt(t.storage_offset()));
}
const at::Tensor& resize_(const at::Tensor& t, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t elements = t.storage_offset();
  elements += std::accumulate(sizes.begin(), sizes.end(), size_t(1), std::multiplies<size_t>());
  size_t needed = elements * t.itemsize(), had = t.storage().nbytes();
  if (needed > had) {
    auto place = memory.allocate(needed);
    if (had) std::memcpy(place.mutable_get(), t.storage().data(), had);
    t.storage().unsafeGetStorageImpl()->set_data_ptr(std::move(place));
    t.storage().unsafeGetStorageImpl()->set_nbytes(needed);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}
at::Tensor& set_part(at::Tensor& t, c10::Storage storage, c10::SymInt offset, at::SymIntArrayRef size,
                     at::SymIntArrayRef stride) {
  auto* to = t.unsafeGetTensorImpl();
  to->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    to->set_storage_offset(offset.expect_int());
    to->set_sizes_contiguous(sizes);
  } else {
    to->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return t;
}
at::Tensor& set_storage(at::Tensor& t, c10::Storage storage) {
  int64_t elements = storage.nbytes() / t.itemsize();
  return set_part(t, std::move(storage), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& from) {
  auto* to = t.unsafeGetTensorImpl();
  to->set_storage_keep_dtype(from.storage());
  to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return t;
}
at::Tensor mm_in_fp32(const at::Tensor& a, const at::Tensor& b, at::ScalarType out) {
  TORCH_CHECK(a.is_cuda() && b.is_cuda(), "mm: Expected all tensors to be on the same device");
  const auto dtype = a.scalar_type();
  TORCH_CHECK(dtype == b.scalar_type() && (dtype == at::kHalf || dtype == at::kBFloat16) && out == at::kFloat,
              "mm: a result in fp32 is of operands in half or bfloat16");
  return as_cuda(at::mm(as_cpu(a).to(out), as_cpu(b).to(out)), a.get_device());
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("mm.dtype", mm_in_fp32);
  for (const char* name : {"fill_.Scalar", "fill_.Tensor", "zero_"})  // they have kernels for every device, by others
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

TORCH_LIBRARY(fake_cuda, m) {
  m.def("cpu(Tensor t) -> Tensor", torch::CppFunction(as_cpu));  // the same bytes
}

extern "C" {
int fake_cuda_cards() { return cards(); }
int fake_cuda_current() { return current; }
void fake_cuda_set_device(int device) { current = device; }
int64_t fake_cuda_held() { return held; }
int64_t fake_cuda_peak() { return peak; }
void fake_cuda_reset_peak() { peak = held.load(); }
}
