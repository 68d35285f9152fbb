// A CUDA device made of CPU memory, for a CPU build of PyTorch: tensors say cuda:0, operators run on the CPU.
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <fstream>

using namespace at;
const Device CUDA0(DeviceType::CUDA, 0);

static size_t used = 0, peak = 0, limit = SIZE_MAX;  // bytes
extern "C" size_t used_memory() { return used; }
extern "C" size_t peak_memory() { return peak; }
extern "C" void reset_peak_memory() { peak = used; }
extern "C" void limit_memory(size_t bytes) { limit = bytes; }

const size_t HEADER = 64;  // before each block, with its size
static void release(void* data) {
  auto block = static_cast<char*>(data) - HEADER;
  used -= *reinterpret_cast<size_t*>(block);
  c10::free_cpu(block);
}
struct Memory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, used + bytes <= limit, "CUDA out of memory. Tried to allocate ", bytes, " bytes");
    peak = std::max(peak, used += bytes);
    auto block = static_cast<char*>(c10::alloc_cpu(bytes + HEADER));
    *reinterpret_cast<size_t*>(block) = bytes;
    return {block + HEADER, block + HEADER, &release, CUDA0};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;
static c10::AllocatorRegisterer<DeviceType::CUDA> allocator(&memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const noexcept override { return CUDA0; }
  Device exchangeDevice(Device) const noexcept override { return CUDA0; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, CUDA0); }
  Stream getNewStream(Device, int) const override { return getStream(CUDA0); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
static c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
// Takes the place of the function in libtorch_cpu, which is loaded later
namespace accelerator {
std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace accelerator
}  // namespace at

static Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device>,
                    std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), type.value_or(kFloat), format);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type,
                            std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::CUDA), type.value_or(kFloat));
}

// The same memory as a tensor of the CPU
static Tensor on_cpu(const Tensor& x) {
  if (!x.is_cuda()) return x;
  auto data = DataPtr(x.storage().mutable_data(), Device(kCPU));
  auto storage = Storage(Storage::use_byte_size_t(), x.storage().nbytes(), std::move(data), nullptr, false);
  return at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), x.dtype())
      .as_strided(x.sizes(), x.strides(), x.storage_offset());
}
static Tensor& copy(Tensor& to, const Tensor& from, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
static const Tensor& resize(const Tensor& x, IntArrayRef size, std::optional<MemoryFormat>) {
  if (x.sizes() == size) return x;
  auto larger = at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), x.scalar_type(), {});
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(larger.storage());
  x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return x;
}
static Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sizes(), {});
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
static Scalar read_scalar(const Tensor& x) { return on_cpu(x).item(); }

static void on_the_cpu(const OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    auto check = [&](const Tensor& x) {
      TORCH_CHECK(!x.defined() || x.is_cuda() || x.dim() == 0, "Expected all tensors to be on the same device, but ",
                  op.schema().name(), " got a CPU tensor of shape ", x.sizes());
    };
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& x : value.toTensorVector()) check(x);
  }
  native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_reshape_alias", &native::_reshape_alias);
  m.impl("as_strided", &native::as_strided_tensorimpl);
  m.impl("view", &native::view);
  m.impl("set_.source_Storage", &native::set_);
  m.impl("set_.source_Storage_storage_offset", &native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &native::set_tensor_);
  m.impl("copy_", &copy);
  m.impl("resize_", &resize);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
