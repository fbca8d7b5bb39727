package lowlatency

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Table is what was measured. It is data: what to use follows from it, the same on
// every rank.
type Table []Row

// Row is the time of one collective on one kind of machine.
type Row struct {
	Model   string // of the devices
	Link    Link
	Ranks   int
	Kind    backend.Kind
	DType   backend.DType // 0 stands for every type that there are kernels for
	Source  string        // where the numbers come from
	Samples []Sample      // by size
}

// Sample is the time of a call, in microseconds, by algorithm; 0 is not measured.
type Sample struct {
	Bytes   int // of the operand; of one chunk where there are chunks
	Inner   float64
	Flagged float64
	OneShot float64
	TwoShot float64
}

func (s Sample) time(a Algorithm) float64 {
	switch a {
	case Inner:
		return s.Inner
	case Flagged:
		return s.Flagged
	case OneShot:
		return s.OneShot
	case TwoShot:
		return s.TwoShot
	}
	return 0
}

// ParseTable reads a table in JSON, as json.Marshal writes it.
func ParseTable(text []byte) (Table, error) {
	var t Table
	if err := json.Unmarshal(text, &t); err != nil {
		return nil, fmt.Errorf("table of measured times: %w", err)
	}
	for i, row := range t {
		if !slices.IsSortedFunc(row.Samples, func(a, b Sample) int { return a.Bytes - b.Bytes }) || !row.Kind.Valid() {
			return nil, fmt.Errorf("table of measured times: row %d: want a collective, and samples in the order of their sizes", i)
		}
	}
	return t, nil
}

// find returns the row for a call, nil if there is none: that of its type before
// that of every type.
func (t Table) find(model string, link Link, ranks int, kind backend.Kind, d backend.DType) *Row {
	var found *Row
	for i := range t {
		r := &t[i]
		if r.Model != model || r.Link != link || r.Ranks != ranks || r.Kind != kind || r.DType != 0 && r.DType != d {
			continue
		}
		if found == nil || r.DType == d {
			found = r
		}
	}
	return found
}

// at returns an algorithm's time for a size, 0 if it is not known: between two
// samples it is interpolated, in logarithms; below the first one it is that of the
// first.
func (r *Row) at(a Algorithm, nbytes int) float64 {
	i := slices.IndexFunc(r.Samples, func(s Sample) bool { return s.Bytes >= nbytes })
	if i < 0 {
		return 0
	}
	hi := r.Samples[i].time(a)
	if i == 0 || r.Samples[i].Bytes == nbytes {
		return hi
	}
	lo := r.Samples[i-1].time(a)
	if lo == 0 || hi == 0 {
		return 0
	}
	below, above := float64(r.Samples[i-1].Bytes), float64(r.Samples[i].Bytes)
	share := math.Log(float64(nbytes)/below) / math.Log(above/below)
	return math.Exp(math.Log(lo)*(1-share) + math.Log(hi)*share)
}

// worthwhile is what share of inner's time an algorithm may take at most to be
// used: times vary by a few percent from run to run.
const worthwhile = 0.97

// best returns the fastest algorithm for a size.
func (r *Row) best(nbytes int) Algorithm {
	inner := r.at(Inner, nbytes)
	best, least := Inner, inner*worthwhile
	if inner == 0 {
		return Inner // beyond what was measured, or not measured
	}
	for _, a := range []Algorithm{TwoShot, OneShot, Flagged} {
		if t := r.at(a, nbytes); t > 0 && t < least {
			best, least = a, t
		}
	}
	return best
}

// limit says what to use up to a size.
type limit struct {
	upTo int // bytes
	use  Algorithm
}

// between is how many sizes are looked at from one sample to the next: thresholds
// are as fine as that.
const between = 16

// limits returns the thresholds in bytes; beyond the last one calls are inner's.
func (r *Row) limits() []limit {
	if r == nil {
		return nil
	}
	var all []limit
	add := func(nbytes int) {
		use := r.best(nbytes)
		if n := len(all); n > 0 && all[n-1].use == use {
			all[n-1].upTo = nbytes
			return
		}
		all = append(all, limit{nbytes, use})
	}
	for i, s := range r.Samples {
		if i > 0 {
			from := float64(r.Samples[i-1].Bytes)
			for j := 1; j < between; j++ {
				add(int(from * math.Pow(float64(s.Bytes)/from, float64(j)/between)))
			}
		}
		add(s.Bytes)
	}
	return all
}

// pick returns what the thresholds say.
func pick(all []limit, nbytes int) Algorithm {
	for _, s := range all {
		if nbytes <= s.upTo {
			return s.use
		}
	}
	return Inner
}

// explain prints a row's choice for a size, and its rivals.
func (r *Row) explain(nbytes int) string {
	if r == nil {
		return "nothing was measured for these devices and ranks, so calls are inner's: euryale bench --tune measures"
	}
	var times []string
	for _, a := range Algorithms() {
		if t := r.at(a, nbytes); t > 0 {
			times = append(times, fmt.Sprintf("%v %.1f us", a, t))
		}
	}
	var used []string
	for _, l := range r.limits() {
		used = append(used, fmt.Sprintf("%v up to %s", l.use, size(l.upTo)))
	}
	used = append(used, "then inner")
	if times == nil {
		times = []string{"not measured at this size"}
	}
	return fmt.Sprintf("measured (%s): %s; used: %s", r.Source, strings.Join(times, ", "), strings.Join(used, ", "))
}

// size prints a number of bytes.
func size(nbytes int) string {
	switch {
	case nbytes >= 1<<20:
		return fmt.Sprintf("%.4g MiB", float64(nbytes)/(1<<20))
	case nbytes >= 1<<10:
		return fmt.Sprintf("%.4g KiB", float64(nbytes)/(1<<10))
	}
	return fmt.Sprintf("%d B", nbytes)
}

// Shipped returns the table that comes with the module. Its numbers are of other
// kernels with the same data flow, on NVLink with NCCL 2.28.3 (NVLS off), CUDA 13.0,
// back-to-back launches, November 2026: "flagged" of a prototype, f32; "one-shot" and
// "two-shot" of PyTorch's symmetric memory, bf16. To be measured again with the
// kernels of this module, for every number of ranks.
func Shipped() Table {
	const source = "H200 SXM, prototype and PyTorch's kernels, 2026-11-20; to be measured again"
	return Table{
		{Model: "NVIDIA H200", Link: FullyConnected, Ranks: 2, Kind: backend.AllReduce, Source: source, Samples: []Sample{
			{Bytes: 1 << 10, Inner: 6.5, Flagged: 3.1, OneShot: 6.5, TwoShot: 6.4},
			{Bytes: 16 << 10, Inner: 7.3, Flagged: 3.5, OneShot: 7.2, TwoShot: 6.6},
			{Bytes: 64 << 10, Inner: 7.6, Flagged: 3.8, OneShot: 7.5, TwoShot: 7.3},
			{Bytes: 256 << 10, Inner: 8.8, Flagged: 5.0, OneShot: 8.4, TwoShot: 7.5},
			{Bytes: 1 << 20, Inner: 13.8, Flagged: 11.3, OneShot: 13.2, TwoShot: 10.0},
			{Bytes: 4 << 20, Inner: 32, OneShot: 30.6, TwoShot: 19.9},
			{Bytes: 10 << 20, Inner: 54, OneShot: 64, TwoShot: 38.8},
			{Bytes: 32 << 20, Inner: 140, OneShot: 190, TwoShot: 108},
		}},
		{Model: "NVIDIA H200", Link: FullyConnected, Ranks: 4, Kind: backend.AllReduce, Source: source, Samples: []Sample{
			{Bytes: 1 << 10, Inner: 9.5, Flagged: 4.2, OneShot: 6.5, TwoShot: 6.5},
			{Bytes: 16 << 10, Inner: 10.7, Flagged: 4.4, OneShot: 7.3, TwoShot: 6.8},
			{Bytes: 64 << 10, Inner: 11.1, Flagged: 5.3, OneShot: 8.2, TwoShot: 8.8},
			{Bytes: 256 << 10, Inner: 11.4, Flagged: 8.6, OneShot: 13.4, TwoShot: 9.0},
			{Bytes: 1 << 20, Inner: 17.1, Flagged: 26, OneShot: 18.4, TwoShot: 12.9},
			{Bytes: 4 << 20, Inner: 39.6, OneShot: 48.5, TwoShot: 28.1},
			{Bytes: 10 << 20, Inner: 73, OneShot: 107, TwoShot: 60.3},
			{Bytes: 32 << 20, Inner: 171, OneShot: 334, TwoShot: 171},
		}},
	}
}
