; A device function that sets the condition of a CUDA graph's loop or branch, linked into Triton kernels.
; cudaGraphSetConditional stays an undefined symbol: the CUDA driver resolves it when the kernel is loaded.
target datalayout = "e-i64:64-i128:128-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"

declare void @cudaGraphSetConditional(i64, i32)

define i32 @dlmrt_set_condition(i64 %handle, i32 %value) {
  call void @cudaGraphSetConditional(i64 %handle, i32 %value)
  ret i32 %value
}
