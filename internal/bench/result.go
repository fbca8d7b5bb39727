package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// Result is the measurement of one size. Times are of one call, in
// microseconds; bandwidths are in GB/s, of 1e9 bytes.
type Result struct {
	Collective string  `json:"collective"`
	Backend    string  `json:"backend"`
	Ranks      int     `json:"ranks"`
	DType      string  `json:"dtype"`
	Bytes      int     `json:"bytes"`
	P50Micros  float64 `json:"p50_us"`     // median on rank 0
	P99Micros  float64 `json:"p99_us"`     // on rank 0
	AlgBW      float64 `json:"algbw_gbps"` // Bytes per StreamMicros, or per MeanMicros
	BusBW      float64 `json:"busbw_gbps"` // of the busiest link
	Wrong      int     `json:"wrong"`      // elements, over all ranks

	// On a device: the mean of calls that are started back to back without a
	// Join between them, and how much of it the host takes to start one, both on
	// the slowest rank. 0 on the host, where a call is done when Start returns.
	StreamMicros float64 `json:"stream_us,omitempty"`
	HostMicros   float64 `json:"host_us,omitempty"`

	Op         string  `json:"op,omitempty"`
	MeanMicros float64 `json:"mean_us"` // on the slowest rank, calls joined one by one
	Iters      int     `json:"iters"`   // timed calls, joined one by one
	Algorithm  string  `json:"algorithm"`
	Used       string  `json:"used,omitempty"` // of low-latency kernels, where there are
	Alloc      bool    `json:"alloc"`
	InPlace    bool    `json:"inplace"`
	InProc     bool    `json:"inproc"`            // ranks are goroutines of one process
	Device     string  `json:"device,omitempty"`  // the model of the GPU
	Machine    string  `json:"machine,omitempty"` // see [Machine]
	Version    string  `json:"version,omitempty"` // of this module

	kind backend.Kind
}

// rate derives the bandwidths.
func (r *Result) rate(P int) {
	call := r.MeanMicros
	if r.onDevice() {
		call = r.StreamMicros
	}
	if call > 0 { // not every clock counts so short a time
		r.AlgBW = float64(r.Bytes) / call / 1e3
	}
	r.BusBW = r.AlgBW * r.kind.BusFactor(P)
}

// onDevice reports whether the buffers were on a device.
func (r Result) onDevice() bool { return r.StreamMicros > 0 }

// WriteJSON writes the result as one line.
func (r Result) WriteJSON(w io.Writer) error {
	for _, x := range []*float64{&r.P50Micros, &r.P99Micros, &r.AlgBW, &r.BusBW, &r.MeanMicros,
		&r.StreamMicros, &r.HostMicros} {
		*x = math.Round(*x*1e4) / 1e4
	}
	return json.NewEncoder(w).Encode(r)
}

// WriteTitles writes the head of the table that WriteRow adds to, for buffers
// of the host or on a device.
func WriteTitles(w io.Writer, device bool) error {
	names, units := "", ""
	if device {
		names, units = fmt.Sprintf(" %11s %9s", "stream", "host"), fmt.Sprintf(" %11s %9s", "(us)",
			"(us)")
	}
	_, err := fmt.Fprintf(w, "#%11s %12s %6s %5s%s %11s %11s %11s %7s %9s %9s %7s\n#%11s %12s "+
		"%6s %5s%s %11s %11s %11s %7s %9s %9s %7s\n",
		"size", "count", "dtype", "op", names, "p50", "p99", "mean", "iters", "algbw", "busbw",
		"wrong",
		"(bytes)", "(elements)", "", "", units, "(us)", "(us)", "(us)", "", "(GB/s)", "(GB/s)", "")
	return err
}

// WriteRow writes the result as a row of the table.
func (r Result) WriteRow(w io.Writer) error {
	op, count, stream := r.Op, r.Bytes, ""
	if op == "" {
		op = "-"
	}
	if d, err := backend.ParseDType(r.DType); err == nil {
		count /= d.Size()
	}
	if r.onDevice() {
		stream = fmt.Sprintf(" %11.2f %9.2f", r.StreamMicros, r.HostMicros)
	}
	_, err := fmt.Fprintf(w, " %11d %12d %6s %5s%s %11.2f %11.2f %11.2f %7d %9.3f %9.3f %7d\n",
		r.Bytes, count, r.DType, op, stream, r.P50Micros, r.P99Micros, r.MeanMicros, r.Iters,
		r.AlgBW, r.BusBW, r.Wrong)
	return err
}
