// Package tensorboard reads event files as TensorBoard does. It shares nothing with their writer,
// of package fit, whose tests compare both with TensorBoard's own.
package tensorboard

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// Curves are the numbers that people see, by name and step.
type Curves map[string]map[int]float32

// Add adds a number, which must be the only one of its step.
func (c Curves) Add(name string, step int, x float32) error {
	if c[name] == nil {
		c[name] = map[int]float32{}
	}
	if _, ok := c[name][step]; ok {
		return fmt.Errorf("%s has step %d twice", name, step)
	}
	c[name][step] = x
	return nil
}

// castagnoli is CRC-32C, bit by bit.
func castagnoli(of []byte) uint32 {
	sum := ^uint32(0)
	for _, b := range of {
		sum ^= uint32(b)
		for range 8 {
			sum = sum>>1 ^ 0x82f63b78*(sum&1)
		}
	}
	return ^sum
}

// messageField is a field of a message: a number, or bytes.
type messageField struct {
	number int
	value  uint64
	bytes  []byte
}

// message decodes a message of protocol buffers.
func message(from []byte) (fields []messageField) {
	for len(from) > 0 {
		tag, n := binary.Uvarint(from)
		from = from[n:]
		f := messageField{number: int(tag >> 3)}
		switch tag & 7 {
		case 0:
			f.value, n = binary.Uvarint(from)
		case 1:
			f.value, n = binary.LittleEndian.Uint64(from), 8
		case 2:
			length, m := binary.Uvarint(from)
			n = m + int(length)
			f.bytes = from[m:n]
		case 5:
			f.value, n = uint64(binary.LittleEndian.Uint32(from)), 4
		}
		fields, from = append(fields, f), from[n:]
	}
	return fields
}

// records returns the records of a file, after a look at their checksums.
func records(t testing.TB, path string) (all [][]byte) {
	t.Helper()
	whole := require.Value(os.ReadFile(path))(t)
	check := func(of, sum []byte) {
		want := castagnoli(of)
		want = (want>>15 | want<<17) + 0xa282ead8
		require.Equal(t, path+": a checksum", binary.LittleEndian.Uint32(sum), want)
	}
	for len(whole) > 0 {
		n := binary.LittleEndian.Uint64(whole)
		check(whole[:8], whole[8:12])
		check(whole[12:12+n], whole[12+n:16+n])
		all, whole = append(all, whole[12:12+n]), whole[16+n:]
	}
	return all
}

// simple is the field of a value that is one number; histo that of a histogram.
const simple, histo = 2, 5

// Histograms returns the histograms of a directory by name, one after the other: least, most,
// number, sum and sum of squares, then the limits of bins, and their counts.
func Histograms(t testing.TB, dir string) map[string][][]float64 {
	t.Helper()
	all := map[string][][]float64{}
	for _, path := range require.Value(filepath.Glob(filepath.Join(dir, "*tfevents*")))(t) {
		for _, event := range records(t, path) {
			for _, f := range message(event) {
				if f.number != 5 {
					continue
				}
				for _, of := range message(f.bytes) {
					if v := message(of.bytes); v[1].number == histo {
						name := string(v[0].bytes)
						all[name] = append(all[name], histogram(v[1].bytes))
					}
				}
			}
		}
	}
	return all
}

func histogram(from []byte) (all []float64) {
	for _, f := range message(from) {
		if f.bytes == nil {
			all = append(all, math.Float64frombits(f.value))
		}
		for at := 0; at < len(f.bytes); at += 8 {
			all = append(all, math.Float64frombits(binary.LittleEndian.Uint64(f.bytes[at:])))
		}
	}
	return all
}

// Shown returns what TensorBoard shows of a directory: a session that starts with a step purges it
// and later ones.
func Shown(t testing.TB, dir string) Curves {
	t.Helper()
	c := Curves{}
	for _, path := range require.Value(filepath.Glob(filepath.Join(dir, "*tfevents*")))(t) {
		for _, event := range records(t, path) {
			step := 0
			for _, f := range message(event) {
				switch f.number {
				case 2:
					step = int(f.value)
				case 5:
					for _, of := range message(f.bytes) {
						v := message(of.bytes)
						if v[1].number == simple {
							require.NoError(t, c.Add(string(v[0].bytes), step,
								math.Float32frombits(uint32(v[1].value))))
						}
					}
				case 7:
					for _, steps := range c {
						maps.DeleteFunc(steps, func(s int, _ float32) bool { return s >= step })
					}
				}
			}
		}
	}
	return c
}
