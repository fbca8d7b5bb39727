package gpu

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/tuning"
)

// section names the tables in the user's file.
const section = "lowlatency"

// Measured returns the rows of the user's file, if there is one, and those of Shipped
// that they do not cover. The file is tuning.json in the directory euryale of the
// user's cache, or what EURYALE_TUNING names.
func Measured() (Table, error) {
	own, err := tuning.Read[Row](section)
	return Table(own).over(Shipped()), err
}

// Keep puts rows into the user's file, in the place of those for the same devices,
// links, ranks, collective and type, and returns the name of the file.
func (t Table) Keep() (file string, err error) {
	return tuning.Update(section, func(rows []Row) []Row {
		rows = slices.DeleteFunc(rows, func(old Row) bool {
			return slices.ContainsFunc(t, old.replaces)
		})
		return append(rows, t...)
	})
}

// replaces reports whether two rows are of the same calls.
func (r Row) replaces(other Row) bool { return r.covers(other) && r.DType == other.DType }
