package fit

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/euryale-ml/euryale/internal/files"
)

// line returns a hook that prints an epoch, on rank 0.
func (t *trainer) line(w io.Writer) func(e Epoch) error {
	return func(e Epoch) error {
		if t.comm.Rank() > 0 {
			return nil
		}
		_, err := fmt.Fprintf(w, "epoch %d/%d: %v\n", e.Epoch, t.epochs, e)
		return err
	}
}

// say writes a line where Progress does.
func (t *trainer) say(format string, args ...any) (err error) {
	for i := 0; i < len(t.says) && t.comm.Rank() == 0; i++ {
		_, failed := fmt.Fprintf(t.says[i], format+"\n", args...)
		err = errors.Join(err, failed)
	}
	return err
}

// large is from which number on a column should be scaled: learnables and rates are chosen for
// numbers around 1.
const large = 100

// sayColumns names the columns of a table that should be scaled.
func (t *trainer) sayColumns() error {
	m := t.data.mapping()
	if len(t.says) == 0 || t.comm.Rank() > 0 || len(m.Columns) == 0 || len(m.Means) > 0 {
		return nil
	}
	most, x := make([]float64, len(m.Columns)), make([]float64, len(m.Columns))
	for i := range t.data.some(len(x)) {
		if t.data.Set.Read(i, []any{x}) != nil {
			return nil // whoever needs the sample says so
		}
		for c := range x {
			most[c] = max(most[c], math.Abs(x[c]))
		}
	}
	var names []string
	for c, name := range m.Columns {
		if most[c] >= large {
			names = append(names, fmt.Sprintf("%q (%.3g)", name, most[c]))
		}
	}
	if len(names) == 0 {
		return nil
	}
	return t.say("fit: these columns have large numbers, by which trainings may learn nothing: "+
		"%s: scale them by data.Standardize", strings.Join(names, ", "))
}

// log is a file of all epochs.
type log struct {
	file  string
	write func(io.Writer, []Epoch) error
}

// writeLogs replaces the files of all epochs, on rank 0.
func (t *trainer) writeLogs() (err error) {
	for i := 0; i < len(t.logs) && t.comm.Rank() == 0; i++ {
		epochs := slices.Clone(t.past.Epochs)
		for k := range epochs {
			epochs[k].Metrics = maps.Clone(epochs[k].Metrics)
		}
		err = errors.Join(err, files.Replace(t.logs[i].file, func(w io.Writer) error {
			return t.logs[i].write(w, epochs)
		}))
	}
	return err
}

// tryLogs returns an error on rank 0 if there is a file that cannot be replaced.
func (t *trainer) tryLogs() (err error) {
	tried := errors.New("tried")
	for i := 0; i < len(t.logs) && t.comm.Rank() == 0; i++ {
		wrong := files.Replace(t.logs[i].file, func(io.Writer) error { return tried })
		if !errors.Is(wrong, tried) {
			err = errors.Join(err, fmt.Errorf("fit.Log: %w", wrong))
		}
	}
	return err
}

// String returns the losses and metrics: "loss=0.0312 accuracy=0.9841 val_loss=0.0541".
func (e Epoch) String() string {
	text := fmt.Sprintf("loss=%.4f", e.Loss)
	for _, name := range slices.Sorted(maps.Keys(e.Metrics)) {
		text += fmt.Sprintf(" %s=%.4f", column(name), e.Metrics[name])
	}
	return text
}

// column names a metric beside the loss of the training.
func column(metric string) string {
	if metric == "loss" {
		return "val_loss"
	}
	return metric
}

// JSONLines writes each epoch as a line of JSON, for [Log].
func JSONLines(w io.Writer, epochs []Epoch) error {
	out, err := json.NewEncoder(w), error(nil)
	for _, e := range epochs {
		err = errors.Join(err, out.Encode(e))
	}
	return err
}

// CSV writes a header and a line for each epoch, for [Log]: fields that an epoch does not have are
// empty.
func CSV(w io.Writer, epochs []Epoch) error {
	all := map[string]float64{}
	for _, e := range epochs {
		maps.Copy(all, e.Metrics)
	}
	metrics := slices.Sorted(maps.Keys(all))
	lines := [][]string{{"epoch", "steps", "rate", "loss", "seconds"}}
	for _, name := range metrics {
		lines[0] = append(lines[0], column(name))
	}
	number := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	for _, e := range epochs {
		line := []string{strconv.Itoa(e.Epoch), strconv.Itoa(e.Steps), number(e.Rate),
			number(e.Loss), number(e.Seconds)}
		for _, name := range metrics {
			cell := ""
			if x, ok := e.Metrics[name]; ok {
				cell = number(x)
			}
			line = append(line, cell)
		}
		lines = append(lines, line)
	}
	return csv.NewWriter(w).WriteAll(lines)
}
