package fit

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// log is a file of all epochs.
type log struct {
	file  string
	write func(w io.Writer, epochs []Epoch) error
}

// report prints an epoch and writes the logs, on rank 0.
func (t *trainer) report(e Epoch) error {
	if t.out != nil {
		if _, err := fmt.Fprintf(t.out, "epoch %d/%d: %v\n", e.Epoch, t.epochs, e); err != nil {
			return err
		}
	}
	for _, l := range t.logs {
		if err := l.save(t.past.Epochs); err != nil {
			return fmt.Errorf("log %s: %w", l.file, err)
		}
	}
	return nil
}

// save replaces the file at once, so that readers always see a whole one.
func (l log) save(epochs []Epoch) error {
	f, err := os.CreateTemp(filepath.Dir(l.file), filepath.Base(l.file)+".*")
	if err != nil {
		return err
	}
	err = errors.Join(l.write(f, epochs), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), l.file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// String returns the losses and metrics: "loss=0.0312 val_loss=0.0541 accuracy=0.9841".
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
	out := json.NewEncoder(w)
	for _, e := range epochs {
		if err := out.Encode(e); err != nil {
			return err
		}
	}
	return nil
}

// CSV writes a header and a line for each epoch, for [Log]: what an epoch does not have is empty.
func CSV(w io.Writer, epochs []Epoch) error {
	names := map[string]bool{}
	for _, e := range epochs {
		for name := range e.Metrics {
			names[name] = true
		}
	}
	header := []string{"epoch", "steps", "rate", "loss", "seconds"}
	metrics := slices.Sorted(maps.Keys(names))
	for _, name := range metrics {
		header = append(header, column(name))
	}
	out := csv.NewWriter(w)
	err := out.Write(header)
	number := func(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }
	for _, e := range epochs {
		line := []string{strconv.Itoa(e.Epoch), strconv.Itoa(e.Steps), number(e.Rate),
			number(e.Loss), number(e.Seconds)}
		for _, name := range metrics {
			x, ok := e.Metrics[name]
			line = append(line, number(x))
			if !ok {
				line[len(line)-1] = ""
			}
		}
		err = errors.Join(err, out.Write(line))
	}
	out.Flush()
	return errors.Join(err, out.Error())
}
