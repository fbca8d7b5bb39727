package backend

import (
	"fmt"
	"unsafe"
)

// Float16 and BFloat16 hold the bits of one 16-bit float. They exist so that slices of them have a
// DType. A [Queue] does the arithmetic on them.
type (
	Float16  uint16
	BFloat16 uint16
)

// Element is a Go type that has a DType.
type Element interface {
	Float16 | BFloat16 | float32 | float64 | int32 | int64 | byte
}

// DTypeOf returns the DType of T.
func DTypeOf[T Element]() DType {
	switch any(*new(T)).(type) {
	case Float16:
		return F16
	case BFloat16:
		return BF16
	case float32:
		return F32
	case float64:
		return F64
	case int32:
		return I32
	case int64:
		return I64
	default:
		return U8
	}
}

// Buffer names a run of elements in host or device memory. It does not own the memory: whoever made
// it frees it. A Buffer of host memory keeps a Go slice reachable. The zero Buffer is empty. A rank
// passes it where it has no operand, such as the destination of a Reduce on a rank other than root.
type Buffer struct {
	host  unsafe.Pointer // nil for device memory
	addr  uintptr        // 0 for host memory
	n     int
	dtype DType
}

// Of returns the Buffer of a Go slice.
func Of[T Element](s []T) Buffer {
	return Host(DTypeOf[T](), unsafe.Pointer(unsafe.SliceData(s)), len(s))
}

// Host returns the Buffer of n elements of host memory at p.
func Host(d DType, p unsafe.Pointer, n int) Buffer { return Buffer{host: p, n: n, dtype: d} }

// OnDevice returns the Buffer of n elements at a device address.
func OnDevice(d DType, addr uintptr, n int) Buffer { return Buffer{addr: addr, n: n, dtype: d} }

// Len returns the number of elements.
func (b Buffer) Len() int { return b.n }

// NBytes returns the size in bytes.
func (b Buffer) NBytes() int { return b.n * b.dtype.Size() }

// DType returns the element type; it is not valid for the zero Buffer.
func (b Buffer) DType() DType { return b.dtype }

// Device reports whether the memory is a device's, so that the host must not
// touch it.
func (b Buffer) Device() bool { return b.addr != 0 }

// Addr returns the address of the first element, 0 for the zero Buffer.
func (b Buffer) Addr() uintptr {
	if b.addr != 0 {
		return b.addr
	}
	return uintptr(b.host)
}

// Slice returns elements lo up to hi. It panics, as a Go slice does, when they
// are out of range.
func (b Buffer) Slice(lo, hi int) Buffer {
	if lo < 0 || hi < lo || hi > b.n {
		panic(fmt.Sprintf("backend: Buffer.Slice(%d, %d) of %d elements", lo, hi, b.n))
	}
	offset := lo * b.dtype.Size()
	b.n = hi - lo
	switch {
	case b.n == 0:
		// Keep no pointer past the end of an allocation.
	case b.addr != 0:
		b.addr += uintptr(offset)
	default:
		b.host = unsafe.Add(b.host, offset)
	}
	return b
}

// As returns the same bytes as elements of another type, without a remainder that does not fill an
// element.
func (b Buffer) As(d DType) Buffer {
	b.n, b.dtype = b.NBytes()/d.Size(), d
	return b
}

// Pointer returns the address of the first element in host memory, nil if there is none.
func (b Buffer) Pointer() unsafe.Pointer { return b.host }

// named reports whether the buffer names memory, or needs none.
func (b Buffer) named() bool { return b.n == 0 || b.n > 0 && b.Addr() != 0 }

// Bytes returns the memory of a host Buffer, and nil for one on a device.
func (b Buffer) Bytes() []byte {
	if b.host == nil || b.n == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(b.host), b.NBytes())
}

// View returns the elements of a host Buffer as a slice of T, whose size must be the size of the
// Buffer's DType; nil for a Buffer on a device.
func View[T Element](b Buffer) []T {
	if b.host == nil || b.n == 0 {
		return nil
	}
	if int(unsafe.Sizeof(*new(T))) != b.dtype.Size() {
		panic(fmt.Sprintf("backend: View as %v of a buffer of %v", DTypeOf[T](), b.dtype))
	}
	return unsafe.Slice((*T)(b.host), b.n)
}

// overlaps reports whether a and b share a byte.
func (b Buffer) overlaps(c Buffer) bool {
	if b.n == 0 || c.n == 0 {
		return false
	}
	return b.Addr() < c.Addr()+uintptr(c.NBytes()) && c.Addr() < b.Addr()+uintptr(b.NBytes())
}

// same reports whether a and b are the same run of memory.
func (b Buffer) same(c Buffer) bool { return b.Addr() == c.Addr() && b.n == c.n }
