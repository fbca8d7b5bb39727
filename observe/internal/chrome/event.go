// Package chrome is the Trace Event Format of chrome://tracing and Perfetto, as traces of ranks use
// it.
package chrome

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// File is a trace of a rank, or of several.
type File struct {
	Events []*Event `json:"traceEvents"`
	Unit   string   `json:"displayTimeUnit"`
}

// Write writes a trace.
func Write(w io.Writer, events []*Event) error {
	return json.NewEncoder(w).Encode(File{events, "ns"})
}

// Event is a call of a rank, a part of one, or a name.
type Event struct {
	Name     string `json:"name"`
	Category string `json:"cat,omitempty"` // Collective, Part or Layer, "" for a name
	Phase    string `json:"ph"`            // X, B if the end is not known, M for a name
	Start    Nanos  `json:"ts"`
	Took     Nanos  `json:"dur"`
	Process  int    `json:"pid"` // rank in the job
	Thread   int    `json:"tid"` // queue
	Args     struct {
		Label   string `json:"name,omitempty"` // of a process or a thread
		*Fields        // nil for a name
	} `json:"args"`
}

// The categories of calls.
const (
	Collective = "collective"
	Part       = "part"
	Layer      = "layer" // of a recorded step: no call
)

// Fields are what an Event says of a call.
type Fields struct {
	What      string `json:"call"`
	Group     string `json:"group"`
	Rank      int    `json:"rank"` // in the group
	Bytes     int64  `json:"bytes"`
	Count     int64  `json:"count"`
	DType     string `json:"dtype"`
	Seq       uint64 `json:"seq"`
	Busy      Nanos  `json:"busy,omitempty"` // of a layer: without its waits for calls
	Root      *int   `json:"root,omitempty"`
	Algorithm string `json:"algorithm,omitempty"`
	Error     string `json:"error,omitempty"`
}

// Nanos are nanoseconds, which a trace has as microseconds with three decimals: more digits than a
// float64.
type Nanos int64

// UnmarshalJSON reads microseconds.
func (n *Nanos) UnmarshalJSON(text []byte) error {
	whole, part, _ := strings.Cut(string(text), ".")
	value, err := strconv.ParseInt(whole+(part + "000")[:3], 10, 64)
	*n = Nanos(value)
	return err
}

// MarshalJSON writes microseconds.
func (n Nanos) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%d.%03d", n/1000, n%1000), nil
}

// Millis returns milliseconds.
func (n Nanos) Millis() float64 { return float64(n) / 1e6 }
