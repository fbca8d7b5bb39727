// Package simd has inner loops of package kernels, each for several instruction sets.
//
// An exported function takes its [Level] first and works on memory that its caller has checked. The
// loop in plain Go says what it computes, and runs on processors without assembly. Callers pass
// [Best]; tests pass each of [Levels], so that no level is left out where it can run.
//
// Sums give bitwise identical results at each level. So do element-wise functions at each level
// with vectors; rounded functions differ from their loops in Go (loops.go) by a few units in the
// last place. Matrix multiplications add in an order that depends on the level, and fuse
// multiplications with additions where there is assembly.
//
// # Files
//
// A family of functions is these files, of which make simd writes the last two:
//
//   - FAMILY.go: the exported functions, and the loops in Go;
//   - asm_calls_amd64.go and asm_calls_other.go: which version runs;
//   - gen/FAMILY/main.go: the generator of the assembly. It uses avo, and is in a module of its
//     own, which modules that import this one do not download;
//   - asm_FAMILY_amd64.s and asm_FAMILY_amd64.go: the assembly and its declarations.
package simd
