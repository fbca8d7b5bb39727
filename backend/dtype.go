package backend

import "fmt"

// DType is the type of a buffer's elements. Euryale has this type because tensor.Dtype has no
// 16-bit floats.
type DType uint8

// The element types. F16 is IEEE 754 binary16, BF16 the upper half of an F32;
// both are stored as their 16 bits.
const (
	F16 DType = iota + 1
	BF16
	F32
	F64
	I32
	I64
	U8
)

var dtypes = [...]struct {
	name string
	size int
}{
	F16: {"f16", 2}, BF16: {"bf16", 2}, F32: {"f32", 4}, F64: {"f64", 8},
	I32: {"i32", 4}, I64: {"i64", 8}, U8: {"u8", 1},
}

// DTypes lists every DType.
func DTypes() []DType { return []DType{F16, BF16, F32, F64, I32, I64, U8} }

// Valid reports whether d is one of the listed types.
func (d DType) Valid() bool { return d >= F16 && d <= U8 }

// Size returns the size of one element in bytes, 0 for an invalid DType.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// Float reports whether d is a floating-point type.
func (d DType) Float() bool { return d >= F16 && d <= F64 }

// String returns the short name: "f32".
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypes[d].name
}

// ParseDType is the inverse of String.
func ParseDType(name string) (DType, error) {
	for _, d := range DTypes() {
		if dtypes[d].name == name {
			return d, nil
		}
	}
	return 0, fmt.Errorf("%w: unknown dtype %q: use one of %v", ErrArgument, name, DTypes())
}
