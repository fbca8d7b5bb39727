// Package read makes an [ir.Program] of a graph of Gorgonia v0.9.18.
//
// Everything a machine needs to know of a graph is exported by Gorgonia, except the parameters
// of its own operations: their types are unexported. They are read by reflection, which can
// read unexported fields and cannot write them. The list [Types] says which fields each type
// has; a type with other fields, or another version of Gorgonia, is an error and not a guess.
//
// Operations that are not in the list, such as those of other packages, are [ir.Opaque]: the
// machine runs them where their operands are, or their Do on host tensors.
package read
