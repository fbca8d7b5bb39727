// Package interpret evaluates programs value by value, in the plainest way: by index, in
// float64, each value in memory of its own. It shares no code with planning and execution,
// which tests compare with it.
//
// Every element comes with a bound on how far a machine's may lie from it. The bound is derived: it
// is 0 where all arithmetic up to the element is exact in its dtype whatever the order, as it is
// for small integers, and tests then ask for bitwise identical results. Elsewhere it grows by the
// rounding of each operation, as a running error analysis says (Higham, Accuracy and Stability of
// Numerical Algorithms, 3.3). At a kink, such as that of a rectifier, it is the jump if the bound
// reaches over the kink.
//
//   - number.go: numbers with bounds, and functions of them
//   - sum.go: sums in any order
//   - interpret.go: programs, and operations that move elements
//   - ranks.go: programs of several ranks
//   - layers.go: attention, and operations with windows
package interpret
