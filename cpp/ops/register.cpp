// CUDA implementations of the ops. Their schemas are defined in python (schemas.py), where
// torch built for the CPU finds them too.
#include <torch/csrc/stable/library.h>

#include "bwd.h"
#include "fwd.h"
#include "qkvpacked.h"

STABLE_TORCH_LIBRARY_IMPL(flash_attn_deterministic, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fad::ForwardOps<&fad::fwd>::plain));
  m.impl("fwd_with_residual", TORCH_BOX(&fad::ForwardOps<&fad::fwd>::with_residual));
  m.impl("fwd_with_row_max", TORCH_BOX(&fad::ForwardOps<&fad::fwd>::with_row_max));
  m.impl("fwd_with_row_max_with_residual", TORCH_BOX(&fad::ForwardOps<&fad::fwd>::with_both));
  m.impl("varlen_fwd", TORCH_BOX(&fad::ForwardOps<&fad::varlen_fwd>::plain));
  m.impl("varlen_fwd_with_residual", TORCH_BOX(&fad::ForwardOps<&fad::varlen_fwd>::with_residual));
  m.impl("varlen_fwd_with_row_max", TORCH_BOX(&fad::ForwardOps<&fad::varlen_fwd>::with_row_max));
  m.impl("varlen_fwd_with_row_max_with_residual",
         TORCH_BOX(&fad::ForwardOps<&fad::varlen_fwd>::with_both));
  m.impl("kvcache_fwd", TORCH_BOX(&fad::kvcache_fwd));
  m.impl("bwd", TORCH_BOX(&fad::bwd));
  m.impl("varlen_bwd", TORCH_BOX(&fad::varlen_bwd));
  m.impl("qkvpacked_fwd", TORCH_BOX(&fad::ForwardOps<&fad::qkvpacked_fwd>::plain));
  m.impl("qkvpacked_fwd_with_residual",
         TORCH_BOX(&fad::ForwardOps<&fad::qkvpacked_fwd>::with_residual));
  m.impl("varlen_qkvpacked_fwd", TORCH_BOX(&fad::ForwardOps<&fad::varlen_qkvpacked_fwd>::plain));
  m.impl("varlen_qkvpacked_fwd_with_residual",
         TORCH_BOX(&fad::ForwardOps<&fad::varlen_qkvpacked_fwd>::with_residual));
  m.impl("qkvpacked_bwd", TORCH_BOX(&fad::qkvpacked_bwd));
  m.impl("varlen_qkvpacked_bwd", TORCH_BOX(&fad::varlen_qkvpacked_bwd));
  m.impl("varlen_bwd_sums", TORCH_BOX(&fad::varlen_bwd_sums));
  m.impl("sink_bwd", TORCH_BOX(&fad::sink_bwd));
  m.impl("finish_key_sums", TORCH_BOX(&fad::finish_key_sums));
  m.impl("plan", TORCH_BOX(&fad::plan));
  m.impl("bwd_plan", TORCH_BOX(&fad::bwd_plan));
}
