// Compiled once per instruction set: PDSERVE_ISA is its name and namespace, PDSERVE_TABLE the table it fills.

#include "kernels/attend.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"
#include "kernels/norm_append.h"

#define PDSERVE_QUOTE(name) #name
#define PDSERVE_NAME(name) PDSERVE_QUOTE(name)

namespace pdserve {

const KernelTable PDSERVE_TABLE = {
    PDSERVE_NAME(PDSERVE_ISA), PDSERVE_ISA::Linear, PDSERVE_ISA::RmsNorm, PDSERVE_ISA::Append, PDSERVE_ISA::Attend,
};

}  // namespace pdserve
