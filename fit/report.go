package fit

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

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
