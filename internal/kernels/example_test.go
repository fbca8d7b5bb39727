package kernels_test

import (
	"fmt"
	"log"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/kernels"
)

// Sums of 16-bit floats are added in 32 bits, in the order of the operands, and rounded once: in 16
// bits, 1 + 2^-8 + 2^-8 would stay 1.
func ExampleHost_Reduce() {
	bf16 := func(values ...float32) backend.Buffer {
		x := backend.Of(make([]backend.BFloat16, len(values)))
		if err := (kernels.Host{}).Cast(x, backend.Of(values)); err != nil {
			log.Fatal(err)
		}
		return x
	}
	sum, result := bf16(0), make([]float32, 1)
	if err := (kernels.Host{}).Reduce(backend.Sum, sum, bf16(1), bf16(1.0/256),
		bf16(1.0/256)); err != nil {
		log.Fatal(err)
	}
	if err := (kernels.Host{}).Cast(backend.Of(result), sum); err != nil {
		log.Fatal(err)
	}
	fmt.Println(result[0] == 1+1.0/128)
	// Output: true
}

// Copy2D moves a rectangle: here the middle two columns of a matrix of two rows.
func ExampleHost_Copy2D() {
	matrix := []float32{0, 1, 2, 3, 10, 11, 12, 13}
	columns := make([]float32, 4)
	if err := (kernels.Host{}).Copy2D(backend.Of(columns), 2, backend.Of(matrix[1:]), 4, 2,
		2); err != nil {
		log.Fatal(err)
	}
	fmt.Println(columns)
	// Output: [1 2 11 12]
}
