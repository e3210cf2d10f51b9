// What tells torch that it has CUDA. Loaded before torch, which asks once, while it is imported.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

extern "C" int fake_cuda_cards();
extern "C" int fake_cuda_current();
extern "C" void fake_cuda_set_device(int device);

namespace {
// torch looks for it by this name
struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return fake_cuda_cards(); }
  c10::DeviceIndex current_device() const override { return fake_cuda_current(); }
  c10::DeviceIndex getCurrentDevice() const override { return fake_cuda_current(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { fake_cuda_set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = getCurrentDevice();
    setCurrentDevice(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  // random numbers are drawn by CPU kernels, from generators of the CPU
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  // pinned memory is plain memory
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};
}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
